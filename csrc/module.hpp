// SPDX-License-Identifier: Apache-2.0
// What the parts of the Python module share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "layout.hpp"

namespace kvgrpc {

using Memory = nanobind::ndarray<std::uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Words = nanobind::ndarray<const std::int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using WindowWords = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>;
using EntryWords = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                              std::uint64_t, std::uint64_t>;
using GroupWords = std::tuple<std::uint64_t, std::uint64_t, std::vector<EntryWords>>;

inline std::byte* bytes_of(const Memory& memory) { return reinterpret_cast<std::byte*>(memory.data()); }

inline std::vector<Window> windows_of(const std::vector<WindowWords>& windows) {
    std::vector<Window> placed;
    placed.reserve(windows.size());
    for (const auto& [region, offset, size] : windows) placed.push_back({region, offset, size});
    return placed;
}

inline std::vector<Group> groups_of(const std::vector<GroupWords>& groups) {
    std::vector<Group> paged;
    paged.reserve(groups.size());
    for (const auto& [chunk_blocks, num_blocks, entries] : groups) {
        paged.push_back({chunk_blocks, num_blocks, {}});
        for (const auto& words : entries) {
            paged.back().entries.push_back(std::apply([](auto... fields) { return Entry{fields...}; }, words));
        }
    }
    return paged;
}

// Adds what has to do with cards.
void bind_cards(nanobind::module_& module);

}  // namespace kvgrpc
