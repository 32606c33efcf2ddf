// SPDX-License-Identifier: Apache-2.0
#include "mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>
#include <utility>

#include "check.hpp"

// Linux 5.14; the system's headers may be older than its kernel.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace kvgrpc {
namespace {

constexpr std::uint64_t step_bytes = std::uint64_t{64} << 20;  // between two looks at the clock

std::uint64_t page_bytes() {
    static const auto bytes = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

[[noreturn]] void refuse(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

MappedFile::MappedFile(int fd, std::uint64_t offset, std::uint64_t length) : offset_(offset), length_(length) {
    constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    require(length > 0, "a mapping of no bytes");
    require_inside(offset, length, most - page_bytes(), "a mapping beyond what a file can have");
    lead_ = offset % page_bytes();
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) refuse("the file cannot be kept open");
    void* found =
        mmap(nullptr, lead_ + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(offset - lead_));
    if (found == MAP_FAILED) {
        const int error = errno;
        close(fd_);
        errno = error;
        refuse("the file cannot be mapped");
    }
    madvise(found, lead_ + length, MADV_DONTDUMP);  // a core file is no place for what people asked a model
    base_ = static_cast<std::byte*>(found) + lead_;
}

MappedFile::~MappedFile() {
    if (base_ != nullptr) munmap(base_ - lead_, lead_ + length_);
    if (fd_ >= 0) close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      offset_(other.offset_),
      length_(other.length_),
      lead_(other.lead_),
      base_(std::exchange(other.base_, nullptr)) {}

std::uint64_t MappedFile::file_size() const noexcept {
    // A third of fstat's cost; nobody uses the file's position.
    const off_t size = lseek(fd_, 0, SEEK_END);
    return size < 0 ? 0 : static_cast<std::uint64_t>(size);
}

void MappedFile::populate(std::chrono::steady_clock::time_point deadline) const noexcept {
    const auto stop = static_cast<off_t>(end());
    for (off_t at = static_cast<off_t>(offset_); at < stop;) {
        const off_t data = lseek(fd_, at, SEEK_DATA);
        if (data < 0 || data >= stop) return;
        const off_t hole = std::min(lseek(fd_, data, SEEK_HOLE), stop);
        if (hole <= data) return;
        for (at = data; at < hole;) {
            if (std::chrono::steady_clock::now() >= deadline) return;
            std::byte* first = this->at(static_cast<std::uint64_t>(std::max(at, static_cast<off_t>(offset_))));
            std::byte* page = first - reinterpret_cast<std::uintptr_t>(first) % page_bytes();
            const std::uint64_t bytes = std::min<std::uint64_t>(step_bytes, static_cast<std::uint64_t>(hole - at));
            if (madvise(page, bytes + static_cast<std::uint64_t>(first - page), MADV_POPULATE_READ) != 0) return;
            at += static_cast<off_t>(bytes);
        }
    }
}

bool touch(std::byte* start, std::uint64_t length) noexcept {
    std::byte* page = start - reinterpret_cast<std::uintptr_t>(start) % page_bytes();
    return madvise(page, length + static_cast<std::uint64_t>(start - page), MADV_POPULATE_WRITE) == 0;
}

}  // namespace kvgrpc
