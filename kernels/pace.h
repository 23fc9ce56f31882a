#pragma once
namespace tessera { class Pace {}; }
