// SPDX-License-Identifier: Apache-2.0
// A part of a file, mapped shared: memory that another process may change, and take away, at any time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvgrpc {

// Maps bytes [offset, offset + length) of the file for reading and writing, by a descriptor of its own. Unmapped at the
// end. Threads: all of it from any thread; destruction when nobody uses it.
class MappedFile {
  public:
    // Throws BadRequest for a range that cannot be, std::system_error for what the system refuses.
    MappedFile(int fd, std::uint64_t offset, std::uint64_t length);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    MappedFile& operator=(MappedFile&&) = delete;

    // Address of a byte of the file; the caller stays inside what is mapped.
    std::byte* at(std::uint64_t file_offset) const noexcept { return base_ + (file_offset - offset_); }
    std::uint64_t offset() const noexcept { return offset_; }
    std::uint64_t end() const noexcept { return offset_ + length_; }

    // The file's size now, whoever changed it; 0 when the system does not say.
    std::uint64_t file_size() const noexcept;

    // Enters the pages that the file already has into this process's page table, so that copies need not fault them in
    // one by one. Stops at the deadline. Allocates nothing for holes.
    void populate(std::chrono::steady_clock::time_point deadline) const noexcept;

  private:
    int fd_ = -1;
    std::uint64_t offset_ = 0;
    std::uint64_t length_ = 0;
    std::uint64_t lead_ = 0;  // bytes of the first page before the offset
    std::byte* base_ = nullptr;
};

// Takes the pages of [start, start + length) into use, as a first write would, without changing a byte. The memory must
// have room for them (fallocate). False when the system cannot, which costs time later and nothing else.
bool touch(std::byte* start, std::uint64_t length) noexcept;

}  // namespace kvgrpc
