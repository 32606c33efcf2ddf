// SPDX-License-Identifier: Apache-2.0
// Where the blocks of an engine lie in its memory, checked once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mapped_file.hpp"

namespace kvgrpc {

// Memory that windows lie in: bytes [offset, end) of a file or of a card's allocation. `base` is the address of the
// first; one of a card is never followed here.
struct Region {
    std::byte* base;
    std::uint64_t offset;
    std::uint64_t end;

    // Address of a byte; the caller stays inside.
    std::byte* at(std::uint64_t byte) const noexcept { return base + (byte - offset); }
};

// A piece of engine memory: `size` bytes of a region (file) from `offset` on.
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

// The paging in an engine's memory. Every address that a block id below num_blocks can lead to lies inside its window,
// and every window inside its region.
class Paging {
  public:
    // Throws BadRequest when any of that does not hold.
    Paging(std::vector<Region> regions, std::vector<Window> windows, std::vector<Group> groups);

    const std::vector<Region>& regions() const noexcept { return regions_; }
    const std::vector<Window>& windows() const noexcept { return windows_; }
    const std::vector<Group>& groups() const noexcept { return groups_; }
    std::uint64_t object_bytes() const noexcept { return object_bytes_; }  // of one chunk

  private:
    std::vector<Region> regions_;
    std::vector<Window> windows_;
    std::vector<Group> groups_;
    std::uint64_t object_bytes_ = 0;
};

// The paging in files of an engine, mapped; region i is file i. Unmapped at the end.
class Mapping : public Paging {
  public:
    // Throws as Paging does.
    Mapping(std::vector<MappedFile> files, std::vector<Window> windows, std::vector<Group> groups);

    const std::vector<MappedFile>& files() const noexcept { return files_; }

  private:
    std::vector<MappedFile> files_;
};

}  // namespace kvgrpc
