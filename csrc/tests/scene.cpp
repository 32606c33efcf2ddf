// SPDX-License-Identifier: Apache-2.0
#include "scene.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "testing.hpp"

namespace kvgrpc::testing {

File::File(std::uint64_t size) : fd_(memfd_create("engine", MFD_CLOEXEC)), size_(size) {
    EXPECT(fd_ >= 0);
    truncate(size);
}

File::~File() { close(fd_); }

void File::truncate(std::uint64_t size) const { EXPECT(ftruncate(fd_, static_cast<off_t>(size)) == 0); }

std::uint64_t File::size_now() const {
    struct stat found = {};
    EXPECT(fstat(fd_, &found) == 0);
    return static_cast<std::uint64_t>(found.st_size);
}

Bytes File::read() const {
    Bytes bytes(size_now());
    EXPECT(pread(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
    return bytes;
}

void File::write(const Bytes& bytes) const {
    EXPECT(pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
}

std::vector<std::int64_t> words_of(const std::vector<PieceWords>& pieces) {
    std::vector<std::int64_t> words;
    const auto put = [&](std::uint64_t word) { words.push_back(static_cast<std::int64_t>(word)); };
    put(pieces.size());
    for (const PieceWords& piece : pieces) {
        put(piece.extents.size());
        for (const auto& [offset, length] : piece.extents) {
            put(offset);
            put(length);
        }
        put(piece.low);
        put(piece.high);
        for (const auto& [first, ids] : piece.blocks) {
            put(first);
            put(ids.size());
            words.insert(words.end(), ids.begin(), ids.end());
        }
    }
    return words;
}

Mapping Scene::map() const {
    std::vector<MappedFile> mapped;
    mapped.reserve(files.size());
    for (const auto& file : files) mapped.emplace_back(file->fd(), 0, file->size());
    return {std::move(mapped), windows, groups};
}

void Scene::expect(const std::vector<PieceWords>& pieces, Direction direction) {
    std::vector<Bytes> memory;
    for (const auto& file : files) memory.push_back(file->read());
    for (const PieceWords& piece : pieces) {
        std::vector<std::uint64_t> place;
        for (const auto& [offset, length] : piece.extents) {
            for (std::uint64_t i = 0; i < length; ++i) place.push_back(offset + i);
        }
        std::uint64_t at = 0;
        for (std::size_t g = 0; g < groups.size(); ++g) {
            const auto& [first, ids] = piece.blocks[g];
            for (const Entry& e : groups[g].entries) {
                for (std::uint64_t row = 0; row < e.layers * e.planes; ++row) {
                    for (std::uint64_t byte = 0; byte < groups[g].chunk_blocks * e.run_bytes; ++byte, ++at) {
                        const std::uint64_t block = byte / e.run_bytes;
                        if (block < first || block >= first + ids.size() || at < piece.low || at >= piece.high)
                            continue;
                        const std::uint64_t address =
                            windows[e.window].offset + e.base + row / e.planes * e.layer_stride +
                            row % e.planes * e.plane_stride +
                            static_cast<std::uint64_t>(ids[block - first]) * e.block_stride + byte % e.run_bytes;
                        std::byte& engine = memory[windows[e.window].file][address];
                        if (direction == Direction::store) {
                            arena[place[at]] = engine;
                        } else {
                            engine = arena[place[at]];
                        }
                    }
                }
            }
        }
    }
    for (std::size_t i = 0; i < files.size(); ++i) files[i]->write(memory[i]);
}

Scene plain_scene(std::uint64_t blocks, std::uint64_t block_bytes, std::uint64_t chunk_blocks,
                  std::uint64_t arena_bytes) {
    Scene scene;
    scene.files.push_back(std::make_unique<File>(blocks * block_bytes));
    scene.windows = {{0, 0, blocks * block_bytes}};
    scene.groups = {{chunk_blocks, blocks, {{0, 0, 1, 0, 1, 0, block_bytes, block_bytes}}}};
    scene.arena.resize(arena_bytes);
    return scene;
}

std::uint64_t up_to(std::mt19937_64& chance, std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(0, most)(chance);
}

void fill(Bytes& bytes, std::mt19937_64& chance) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
        const std::uint64_t word = chance();
        std::memcpy(bytes.data() + at, &word, std::min(sizeof word, bytes.size() - at));
    }
}

Scene random_scene(std::mt19937_64& chance) {
    Scene scene;
    const std::uint64_t files = 1 + up_to(chance, 2);
    std::vector<std::uint64_t> used(files, up_to(chance, 70));
    for (std::uint64_t g = 0, groups = 1 + up_to(chance, 1); g < groups; ++g) {
        Group group{1 + up_to(chance, 5), 1 + up_to(chance, 11), {}};
        for (std::uint64_t e = 0, entries = up_to(chance, 3); e < entries || (g == 0 && e == 0); ++e) {
            Entry entry = {};
            entry.run_bytes = 1 + up_to(chance, up_to(chance, 3) == 0 ? 2000 : 40);
            entry.block_stride = entry.run_bytes + (up_to(chance, 1) != 0 ? 0 : up_to(chance, 9));
            entry.planes = 1 + up_to(chance, 1);
            entry.plane_stride = entry.block_stride * group.num_blocks + up_to(chance, 5);
            entry.layers = 1 + up_to(chance, 3);
            entry.layer_stride = entry.plane_stride * entry.planes;
            entry.base = up_to(chance, 9);
            entry.window = static_cast<std::uint32_t>(scene.windows.size());
            const auto file = static_cast<std::uint32_t>(up_to(chance, files - 1));
            const std::uint64_t size = entry.base + entry.layer_stride * entry.layers;
            scene.windows.push_back({file, used[file], size});
            used[file] += size + up_to(chance, 3) * up_to(chance, 50);
            group.entries.push_back(entry);
        }
        scene.groups.push_back(group);
    }
    for (const std::uint64_t size : used) {
        scene.files.push_back(std::make_unique<File>(size + 1));
        Bytes bytes(size + 1);
        fill(bytes, chance);
        scene.files.back()->write(bytes);
    }
    return scene;
}

std::vector<PieceWords> random_slice(const Scene& scene, std::mt19937_64& chance, bool repeats) {
    const std::uint64_t object = scene.map().object_bytes();
    std::vector<PieceWords> slice(1 + up_to(chance, 4));
    std::uint64_t used = up_to(chance, 64);
    std::vector<std::vector<std::int64_t>> free;  // ids not yet named, so that pieces have blocks of their own
    for (const Group& group : scene.groups) {
        free.emplace_back(group.num_blocks);
        std::iota(free.back().begin(), free.back().end(), 0);
        std::ranges::shuffle(free.back(), chance);
    }
    for (PieceWords& piece : slice) {
        for (std::uint64_t left = object; left > 0;) {
            const std::uint64_t length = up_to(chance, 2) == 0 ? left : up_to(chance, left);
            piece.extents.emplace_back(used, length);
            used += length + (up_to(chance, 1) == 0 ? 0 : up_to(chance, 30));
            left -= length;
        }
        std::ranges::shuffle(piece.extents, chance);
        piece.low = up_to(chance, 1) == 0 ? 0 : up_to(chance, object);
        piece.high = up_to(chance, 1) == 0 ? object : piece.low + up_to(chance, object - piece.low);
        for (std::size_t g = 0; g < scene.groups.size(); ++g) {
            const Group& group = scene.groups[g];
            const std::uint64_t first = up_to(chance, group.chunk_blocks);
            std::uint64_t count = up_to(chance, group.chunk_blocks - first);
            std::vector<std::int64_t> ids;
            for (; count > 0; --count) {
                if (repeats) {
                    ids.push_back(static_cast<std::int64_t>(up_to(chance, group.num_blocks - 1)));
                } else if (!free[g].empty()) {
                    ids.push_back(free[g].back());
                    free[g].pop_back();
                }
            }
            piece.blocks.emplace_back(first, ids);
        }
    }
    return slice;
}

}  // namespace kvgrpc::testing
