// .npy files: every type, order and version, malformed files of every kind, and NumPy itself if it
// is installed.
#include "client/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/error.h"
#include "tests/temporary_file.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::pair<DType, const char*> kTypes[] = {
    {DType::kF32, "<f4"},  {DType::kF64, "<f8"}, {DType::kF16, "<f2"},
    {DType::kBF16, "|V2"}, {DType::kI32, "<i4"}, {DType::kI64, "<i8"},
    {DType::kBool, "|b1"}, {DType::kU8, "|u1"},  {DType::kI8, "|i1"}};

std::string File(int version, std::string dict, std::string_view data = {}) {
  dict += '\n';
  std::string file("\x93NUMPY");
  file += static_cast<char>(version);
  file += '\0';
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
    file += static_cast<char>(dict.size() >> (8 * i) & 0xff);
  }
  return file + dict + std::string(data);
}

std::string Dict(const std::string& shape, const std::string& descr = "<f4",
                 const std::string& fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }";
}

std::string ReasonOf(const std::string& file) { return ErrorReason(ParseNpyHeader(file).status()); }

TEST(NpyHeader, WhatIsWrittenIsReadBack) {
  const std::vector<std::int64_t> shapes[] = {
      {}, {0}, {7}, {0, 4}, {4, 0}, {3, 5}, {1, 2, 3, 4, 5, 6, 7, 8}, {0, INT64_MAX / 8}};
  for (const auto& [dtype, descr] : kTypes) {
    for (const auto& shape : shapes) {
      const std::string header = MakeNpyHeader(dtype, shape);
      EXPECT_EQ(header.size() % 64, 0u);
      EXPECT_THAT(header, HasSubstr(descr));
      const auto parsed = ParseNpyHeader(header);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(parsed->dtype, dtype);
      EXPECT_EQ(parsed->shape, shape);
      EXPECT_FALSE(parsed->fortran_order);
      EXPECT_EQ(parsed->data_offset, header.size());
      EXPECT_EQ(parsed->data_bytes, *ArrayBytes(dtype, shape));
    }
  }
}

TEST(NpyHeader, TheFreedomsOfPython) {
  for (const char* dict :
       {"{\"shape\":(2,3),\"descr\":\"<f4\",\"fortran_order\":False}",
        "{ 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , 'descr' : '<f4' , }   ",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L)}"}) {
    const auto parsed = ParseNpyHeader(File(1, dict));
    ASSERT_TRUE(parsed.ok()) << dict << ": " << parsed.status();
    EXPECT_THAT(parsed->shape, ElementsAre(2, 3));
  }
  EXPECT_EQ(ParseNpyHeader(File(1, Dict("()", "<V2")))->dtype, DType::kBF16);
}

TEST(NpyHeader, AnUnknownTypeIsQuotedInPartAndWithoutControlCharacters) {
  const absl::Status status =
      ParseNpyHeader(File(1, Dict("(2,)", "\x1b[31m" + std::string(10000, 'x')))).status();
  EXPECT_EQ(ErrorReason(status), "BAD_DTYPE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("\\x1b[31mxx"));
  EXPECT_LT(status.message().size(), 200u);
  EXPECT_LT(ErrorMetadata(status)["descr"].size(), 200u);
}

TEST(NpyHeader, TypesWithoutCounterpart) {
  for (const char* descr : {"<u2", "<c8", "<U3", "|O", "<f", "", "<V4", "f4", "<f16"}) {
    EXPECT_EQ(ReasonOf(File(1, Dict("(2,)", descr))), "BAD_DTYPE") << descr;
  }
  const auto big = ParseNpyHeader(File(1, Dict("(2,)", ">f8")));
  EXPECT_EQ(ErrorReason(big.status()), "BAD_DTYPE");
  EXPECT_THAT(std::string(big.status().message()), HasSubstr("big-endian"));
  EXPECT_EQ(ReasonOf(File(1, "{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (2,)}")),
            "BAD_DTYPE");
}

TEST(NpyHeader, MalformedOnes) {
  for (const char* dict :
       {"", "{", "}", "{}", "[]", "{'descr'}", "{'descr':", "{'descr': '<f4}", "{'descr': 3}",
        "{'descr': '<f4', 'fortran_order': False}",
        "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} more",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'extra': 1}"}) {
    EXPECT_EQ(ReasonOf(File(1, dict)), "BAD_NPY") << dict;
  }
  for (const std::string& shape :
       {std::string("1"), std::string("(-1,)"), std::string("(1.5,)"), std::string("(1 2)"),
        std::string("(,)"), std::string("(99999999999999999999,)"),
        "(" + std::string(10000, '(')}) {
    EXPECT_EQ(ReasonOf(File(1, Dict(shape))), "BAD_NPY") << shape;
  }
  for (const int version : {0, 4}) EXPECT_EQ(ReasonOf(File(version, Dict("(1,)"))), "BAD_NPY");
  EXPECT_EQ(ReasonOf(File(1, Dict("(1,)", "<f4", "Maybe"))), "BAD_NPY");
  for (const char* file : {"", "\x93NUMP", "PK\x03\x04 this is a zip archive"})
    EXPECT_EQ(ReasonOf(file), "BAD_NPY");
}

TEST(NpyHeader, ShapesThatOverflow) {
  for (const char* shape :
       {"(9223372036854775807,)", "(4294967296, 4294967296)", "(3037000500, 3037000500, 2)",
        "(0, 4611686018427387904)", "(1, 1, 1, 1, 1, 1, 1, 1, 1)"}) {
    EXPECT_EQ(ReasonOf(File(1, Dict(shape))), "BAD_SHAPE") << shape;
  }
}

TEST(NpyHeader, EveryTruncationIsRefused) {
  for (int version : {1, 2, 3}) {
    const std::string file = File(version, Dict("(3, 5)"));
    for (std::size_t size = 0; size < file.size(); ++size) {
      EXPECT_EQ(ReasonOf(file.substr(0, size)), "BAD_NPY") << version << " " << size;
    }
  }
  std::string giant = File(2, Dict("(1,)"));
  std::memcpy(giant.data() + 8, "\xff\xff\xff\xff", 4);
  EXPECT_EQ(ReasonOf(giant), "BAD_NPY");
}

TEST(NpyFile, ReadsRangesOfRowMajorData) {
  std::string data(24, '\0');
  std::iota(data.begin(), data.end(), '\0');
  const TemporaryFile file(File(1, Dict("(2, 3)"), data));
  const auto npy = NpyFile::Open(file.path());
  ASSERT_TRUE(npy.ok()) << npy.status();
  std::string out(8, '\0');
  ASSERT_TRUE(npy->Read(12, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, data.substr(12, 8));
  EXPECT_EQ(ErrorReason(npy->Read(20, absl::MakeSpan(out))), "BAD_RANGE");
  EXPECT_TRUE(npy->Read(24, {}).ok());
}

TEST(NpyFile, ReadsColumnMajorDataInRowMajorOrder) {
  for (const char* descr : {"|V2", "<f4", "<f8"}) {
    // In the file, the first index varies fastest.
    const auto size = static_cast<std::size_t>(descr[2] - '0');
    constexpr int kI = 3, kJ = 4, kK = 5;
    const auto append = [&](std::string& to, int i, int j, int k) {
      std::string element = {static_cast<char>(10 * i + j), static_cast<char>(k)};
      element.resize(size, static_cast<char>(i + j + k));
      to += element;
    };
    std::string columns, rows;
    for (int n = 0; n < kI * kJ * kK; ++n) {
      append(columns, n % kI, n / kI % kJ, n / kI / kJ);
      append(rows, n / kK / kJ, n / kK % kJ, n % kK);
    }
    const TemporaryFile file(File(1, Dict("(3, 4, 5)", descr, "True"), columns));
    const auto npy = NpyFile::Open(file.path());
    ASSERT_TRUE(npy.ok()) << npy.status();
    EXPECT_TRUE(npy->header().fortran_order);
    for (std::size_t first : {0, 1, 4, 5, 7, 19, 59}) {
      for (std::size_t count : {0, 1, 3, 5, 11, 60}) {
        if ((first + count) * size > rows.size()) continue;
        std::string out(count * size, '\0');
        ASSERT_TRUE(npy->Read(first * size, absl::MakeSpan(out)).ok());
        EXPECT_EQ(out, rows.substr(first * size, out.size())) << first << " " << count;
      }
    }
  }
}

TEST(NpyFile, ReadsAColumnMajorMatrixOrAnArrayOfNoElementsOrAxes) {
  for (const auto& [shape, rows] : {std::pair<const char*, std::string>{"(2, 3)", "aAbBcCdDeEfF"},
                                    {"()", "aA"},
                                    {"(4,)", "aAdDbBeE"},
                                    {"(0, 3)", ""}}) {
    const TemporaryFile file(File(1, Dict(shape, "<f2", "True"), "aAdDbBeEcCfF"));
    const auto npy = NpyFile::Open(file.path());
    ASSERT_TRUE(npy.ok()) << npy.status();
    std::string out(npy->header().data_bytes, '\0');
    EXPECT_TRUE(npy->Read(0, absl::MakeSpan(out)).ok());
    EXPECT_EQ(out, rows);
  }
}

TEST(NpyFile, AFileThatShrinksIsAnError) {
  // There are whole pages after the new end, and then a part of the last page, which reads as
  // zeros.
  for (const std::uintmax_t rest : {std::uintmax_t{200}, std::uintmax_t{5'000'000}}) {
    for (const char* fortran : {"False", "True"}) {
      const TemporaryFile file(
          File(1, Dict("(1000, 1250)", "<f4", fortran), std::string(5'000'000, 'x')));
      const auto npy = NpyFile::Open(file.path());
      ASSERT_TRUE(npy.ok()) << npy.status();
      std::string out(5'000'000, '\0');
      EXPECT_TRUE(npy->Read(0, absl::MakeSpan(out)).ok());
      std::filesystem::resize_file(file.path(), rest);
      const absl::Status status = npy->Read(0, absl::MakeSpan(out));
      EXPECT_EQ(ErrorReason(status), "BAD_NPY") << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("was truncated"));
    }
  }
}

TEST(NpyFile, RefusesFilesThatAreCutOffOrMissing) {
  const TemporaryFile shorter(File(1, Dict("(2, 3)"), std::string(23, 'x')));
  EXPECT_EQ(ErrorReason(NpyFile::Open(shorter.path()).status()), "BAD_NPY");
  const TemporaryFile absent;
  EXPECT_EQ(ErrorReason(NpyFile::Open(absent.path()).status()), "FILE_NOT_FOUND");
  EXPECT_EQ(ErrorReason(NpyFile::Open("/").status()), "BAD_NPY");
}

TEST(NpyWriter, LeavesNothingUntilItHasFinished) {
  const TemporaryFile file;
  {
    auto writer = NpyWriter::Create(file.path(), DType::kI32, {2});
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append("1234").ok());
    EXPECT_FALSE(std::filesystem::exists(file.path()));
  }
  EXPECT_FALSE(std::filesystem::exists(file.path()));
  auto writer = NpyWriter::Create(file.path(), DType::kI32, {2});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append("1234").ok());
  ASSERT_TRUE(writer->Append("5678").ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(file.Content(), MakeNpyHeader(DType::kI32, {2}) + "12345678");
  EXPECT_EQ(ErrorReason(NpyWriter::Create("/no/such/folder/x.npy", DType::kI32, {}).status()),
            "FILE_ERROR");
}

TEST(NpyWriter, WritesReservedBytesInAnyOrder) {
  const TemporaryFile file;
  auto writer = NpyWriter::Create(file.path(), DType::kU8, {10});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Reserve(8).ok());
  ASSERT_TRUE(writer->WriteAt(4, "5678").ok());
  ASSERT_TRUE(writer->WriteAt(8, "90").ok());  // beyond the reserved bytes
  ASSERT_TRUE(writer->WriteAt(0, "1234").ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(file.Content(), MakeNpyHeader(DType::kU8, {10}) + "1234567890");

  // A file that becomes shorter is like a disk that becomes full.
  const std::filesystem::path folder = file.path() + ".d";
  std::filesystem::create_directory(folder);
  {
    auto full = NpyWriter::Create(folder / "x.npy", DType::kU8, {10'000});
    ASSERT_TRUE(full.ok());
    ASSERT_TRUE(full->Reserve(10'000).ok());
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      std::filesystem::resize_file(entry.path(), 0);
    EXPECT_EQ(ErrorReason(full->WriteAt(5000, "1234")), "FILE_ERROR");
  }
  std::filesystem::remove_all(folder);

  auto large = NpyWriter::Create(file.path(), DType::kU8, {10});
  ASSERT_TRUE(large.ok());
  EXPECT_EQ(ErrorReason(large->Reserve(std::uint64_t{1} << 62)), "FILE_ERROR");
}

TEST(NpyWriter, OpensNoFileThatIsThereAlready) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("tessera-npy-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const std::string path = folder / "x.npy";
  const auto parts = [&] {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".part") names.push_back(entry.path().string());
    }
    return names;
  };
  {
    // Two concurrent writers do not share a file, and neither name predicts the next one.
    auto first = NpyWriter::Create(path, DType::kI32, {0});
    auto second = NpyWriter::Create(path, DType::kI32, {0});
    ASSERT_TRUE(first.ok() && second.ok());
    EXPECT_THAT(parts(), ::testing::SizeIs(2));
    EXPECT_TRUE(first->Finish().ok());
    EXPECT_THAT(parts(), ::testing::SizeIs(1));
  }
  EXPECT_TRUE(parts().empty());
  // The longest name that a file can have.
  auto writer = NpyWriter::Create(folder / std::string(255, 'n'), DType::kI32, {0});
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_TRUE(writer->Finish().ok());
  std::filesystem::remove_all(folder);
}

TEST(NpyWriter, KeepsTheModeOfWhatItReplacesAndTheLinkToIt) {
  const TemporaryFile file("old"), link;
  std::filesystem::create_symlink(std::filesystem::path(file.path()).filename(), link.path());
  const auto mode = [&] { return std::filesystem::status(file.path()).permissions(); };
  using std::filesystem::perms;
  for (const perms kept : {perms::owner_read | perms::owner_write, perms{0666}}) {
    std::filesystem::permissions(file.path(), kept);
    auto writer = NpyWriter::Create(link.path(), DType::kI32, {1});
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE(writer->Append("1234").ok());
    EXPECT_TRUE(writer->Finish().ok());
    EXPECT_TRUE(std::filesystem::is_symlink(link.path()));
    EXPECT_EQ(file.Content(), MakeNpyHeader(DType::kI32, {1}) + "1234");
    EXPECT_EQ(mode(), kept);
  }
}

// --- NumPy itself --------------------------------------------------------------------------------

bool Python(const std::string& code) {
  return std::system(("/usr/bin/python3 -c \"import numpy as np\n" + code + "\"").c_str()) == 0;
}

TEST(NumPy, IsUnderstood) {
  if (!Python("pass")) GTEST_SKIP() << "no NumPy in /usr/bin/python3";
  for (const auto& [dtype, descr] : kTypes) {
    for (const char* order : {"C", "F"}) {
      for (int version : {1, 2, 3}) {
        const TemporaryFile file;
        const TemporaryFile raw;
        ASSERT_TRUE(Python(
            "x = np.arange(2 * 3 * 35, dtype='u1').reshape(2, 3, 35)[..., :32].copy()\n"
            "x = np.asarray(x.view('" +
            std::string(descr) + "'), order='" + order + "')\n" + "with open('" + file.path() +
            "', 'wb') as f:\n"
            "  np.lib.format.write_array(f, x, version=(" +
            std::to_string(version) + ", 0))\n" + "open('" + raw.path() +
            "', 'wb').write(x.tobytes('C'))"));
        const auto npy = NpyFile::Open(file.path());
        ASSERT_TRUE(npy.ok()) << npy.status();
        EXPECT_EQ(npy->header().dtype, dtype);
        EXPECT_EQ(npy->header().fortran_order, *order == 'F');
        std::string out(npy->header().data_bytes, '\0');
        ASSERT_TRUE(npy->Read(0, absl::MakeSpan(out)).ok());
        EXPECT_EQ(out, raw.Content());
      }
    }
  }
}

}  // namespace
}  // namespace tessera
