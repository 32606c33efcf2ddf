// SPDX-License-Identifier: Apache-2.0
#include "layout.hpp"

#include <utility>

#include "check.hpp"

namespace kvgrpc {
namespace {

void check(const Entry& entry, std::uint64_t num_blocks, const std::vector<Window>& windows) {
    require(entry.window < windows.size(), "an entry names a window that is not there");
    require(entry.layers > 0 && entry.planes > 0 && entry.run_bytes > 0, "an entry without layers, planes or bytes");
    // Strides are not negative, so the last block of the last plane of the last layer reaches furthest.
    std::uint64_t end = sum(entry.base, product(entry.layers - 1, entry.layer_stride));
    end = sum(end, product(entry.planes - 1, entry.plane_stride));
    end = sum(end, product(num_blocks - 1, entry.block_stride));
    end = sum(end, entry.run_bytes);
    require(end <= windows[entry.window].size, "an entry reaches beyond its window");
}

std::vector<Region> regions_of(const std::vector<MappedFile>& files) {
    std::vector<Region> regions;
    regions.reserve(files.size());
    for (const MappedFile& file : files) regions.push_back({file.at(file.offset()), file.offset(), file.end()});
    return regions;
}

}  // namespace

Paging::Paging(std::vector<Region> regions, std::vector<Window> windows, std::vector<Group> groups)
    : regions_(std::move(regions)), windows_(std::move(windows)), groups_(std::move(groups)) {
    for (const Window& window : windows_) {
        require(window.file < regions_.size(), "a window names a file that is not there");
        const Region& region = regions_[window.file];
        require(window.offset >= region.offset, "a window begins before what is mapped");
        require_inside(window.offset, window.size, region.end, "a window reaches beyond what is mapped");
    }
    for (const Group& group : groups_) {
        require(group.chunk_blocks > 0 && group.num_blocks > 0, "a group without blocks");
        for (const Entry& entry : group.entries) {
            check(entry, group.num_blocks, windows_);
            const std::uint64_t rows = product(entry.layers, entry.planes);
            const std::uint64_t bytes = product(product(rows, group.chunk_blocks), entry.run_bytes);
            object_bytes_ = sum(object_bytes_, bytes);
        }
    }
}

Mapping::Mapping(std::vector<MappedFile> files, std::vector<Window> windows, std::vector<Group> groups)
    : Paging(regions_of(files), std::move(windows), std::move(groups)), files_(std::move(files)) {}

}  // namespace kvgrpc
