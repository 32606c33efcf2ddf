// SPDX-License-Identifier: Apache-2.0
// Where the blocks of an engine lie in its memory, checked once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mapped_file.hpp"

namespace kvgrpc {

// A piece of engine memory: `size` bytes of a file from `offset` on.
struct Window {
    std::uint32_t file;
    std::uint64_t offset;
    std::uint64_t size;
};

// Block b of plane p of layer l: `run_bytes` at base + l * layer_stride + p * plane_stride + b * block_stride of the
// window.
struct Entry {
    std::uint32_t window;
    std::uint64_t base;
    std::uint64_t layers;
    std::uint64_t layer_stride;
    std::uint64_t planes;
    std::uint64_t plane_stride;
    std::uint64_t block_stride;
    std::uint64_t run_bytes;
};

// Entries with one block size: a chunk has `chunk_blocks` blocks, the engine `num_blocks`.
struct Group {
    std::uint64_t chunk_blocks;
    std::uint64_t num_blocks;
    std::vector<Entry> entries;
};

// An engine's memory, mapped, and the paging in it. Every address that a block id below num_blocks can lead to lies
// inside its window, and every window inside its file's mapping. Unmapped at the end.
class Mapping {
  public:
    // Throws BadRequest when any of that does not hold.
    Mapping(std::vector<MappedFile> files, std::vector<Window> windows, std::vector<Group> groups);

    const std::vector<MappedFile>& files() const noexcept { return files_; }
    const std::vector<Window>& windows() const noexcept { return windows_; }
    const std::vector<Group>& groups() const noexcept { return groups_; }
    std::uint64_t object_bytes() const noexcept { return object_bytes_; }  // of one chunk

  private:
    std::vector<MappedFile> files_;
    std::vector<Window> windows_;
    std::vector<Group> groups_;
    std::uint64_t object_bytes_ = 0;
};

}  // namespace kvgrpc
