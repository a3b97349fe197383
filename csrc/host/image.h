// The device images that the build embedded in this library.
#pragma once

#include <string>
#include <vector>

namespace cuops {

struct Image {
  std::string source;        // its stem: rms_norm
  int capability;            // 90 is compute capability 9.0
  bool ptx;                  // for the driver to compile, rather than machine code
  int cuda;                  // the version of the toolchain that made it: 128 is CUDA 12.8
  unsigned char properties;  // of LZMA
  const unsigned char* stored;
  std::size_t stored_size, size;

  std::vector<char> decompress() const;
};

const std::vector<Image>& images();

// The image of a source for a GPU: its own compute capability, else the highest lower minor of the same major, else PTX.
// Throws UnsupportedArchitectureError, and DamagedBackendError where the source has no image at all.
const Image& choose_image(const std::string& source, int capability);

}  // namespace cuops
