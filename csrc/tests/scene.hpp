// SPDX-License-Identifier: Apache-2.0
// Engine memory in a memfd, an arena beside it, and slices in words; with an oracle that places byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "../host_copy.hpp"

namespace kvgrpc::testing {

using Bytes = std::vector<std::byte>;

// A memfd, mapped by the test itself.
class File {
  public:
    explicit File(std::uint64_t size);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    int fd() const { return fd_; }
    std::uint64_t size() const { return size_; }
    void truncate(std::uint64_t size) const;
    std::uint64_t size_now() const;
    // By the file, so that a hole or an end is no signal.
    Bytes read() const;
    void write(const Bytes& bytes) const;

  private:
    int fd_;
    std::uint64_t size_;
};

struct PieceWords {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
    std::uint64_t low = 0;
    std::uint64_t high = 0;
    std::vector<std::pair<std::uint64_t, std::vector<std::int64_t>>> blocks;
};

std::vector<std::int64_t> words_of(const std::vector<PieceWords>& pieces);

// One group over one file unless said otherwise.
struct Scene {
    std::vector<std::unique_ptr<File>> files;
    std::vector<Window> windows;
    std::vector<Group> groups;
    Bytes arena;

    Mapping map() const;
    // Copies as the contract says, byte by byte, in order, into `arena` or the files.
    void expect(const std::vector<PieceWords>& pieces, Direction direction);
};

// `blocks` blocks of `block_bytes`, side by side in one file; a chunk has `chunk_blocks`.
Scene plain_scene(std::uint64_t blocks, std::uint64_t block_bytes, std::uint64_t chunk_blocks,
                  std::uint64_t arena_bytes);

// Anything that a layout can be: files, windows, strides, groups; memory and arena hold random bytes.
Scene random_scene(std::mt19937_64& chance);
std::vector<PieceWords> random_slice(const Scene& scene, std::mt19937_64& chance, bool repeats);

void fill(Bytes& bytes, std::mt19937_64& chance);
std::uint64_t up_to(std::mt19937_64& chance, std::uint64_t most);  // 0..most

}  // namespace kvgrpc::testing
