// Arrays in .npy, .npz and .safetensors files. A file may have any content: sizes and offsets are
// checked before they are used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/npy.h"

namespace tessera {

struct ArrayInFile {
  std::string file;
  std::string name;  // the name of the buffer that it becomes
  NpyHeader header;
};

// Whether a file of this name holds named arrays, as .npz and .safetensors files do. A file with
// any other name is a .npy file.
bool HoldsNamedArrays(const std::string& path);

// Returns the arrays of a file, or of the files in a folder that have the endings of these formats.
// The name of an array is the prefix, the file's name without its ending, and, in a file of named
// arrays, '/' and the array's name there; '_' replaces characters that names cannot have. `name`
// replaces the file's name unless it is empty. Only headers are read; the CRC-32 of the members of
// .npz files is not checked. Throws BAD_FILE, BAD_NAME, BAD_NPY, BAD_DTYPE, BAD_SHAPE or
// FILE_ERROR.
std::vector<ArrayInFile> FindArrays(const std::string& path, const std::string& name,
                                    const std::string& prefix);

// Downloads buffers into a file of named arrays, whose names are those of the buffers without the
// prefix. If `names` is empty, downloads all buffers with the prefix whose uploads have ended, and
// names the others on stderr. Returns the size of all elements in bytes.
std::uint64_t SaveBuffers(Session& session, std::vector<std::string> names,
                          const std::string& prefix, const std::string& path,
                          DownloadOptions download);

}  // namespace tessera
