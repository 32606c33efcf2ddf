// SPDX-License-Identifier: Apache-2.0
// Every byte in its place, whatever the layout, however many threads, and what is refused.
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "../check.hpp"
#include "scene.hpp"
#include "testing.hpp"

namespace kvgrpc::testing {
namespace {

constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t never = most / 2;

void same_as_oracle(std::mt19937_64& chance, const CopyOptions& options, Direction direction, bool repeats) {
    Scene scene = random_scene(chance);
    const std::vector<PieceWords> slice = random_slice(scene, chance, repeats);
    std::uint64_t end = 0;
    for (const PieceWords& piece : slice) {
        for (const auto& [offset, length] : piece.extents) end = std::max(end, offset + length);
    }
    scene.arena.resize(end);
    fill(scene.arena, chance);
    std::vector<Bytes> before;
    for (const auto& file : scene.files) before.push_back(file->read());
    Bytes arena = scene.arena;
    scene.expect(slice, direction);
    std::vector<Bytes> expected;
    for (std::size_t i = 0; i < scene.files.size(); ++i) {
        expected.push_back(scene.files[i]->read());
        scene.files[i]->write(before[i]);
    }
    HostCopier copier(arena.data(), arena.size(), options);
    const Mapping mapping = scene.map();
    const Report report = copier.copy(mapping, words_of(slice), direction);
    EXPECT(report.completed == slice.size() && report.stop == Stop::none && !report.torn);
    EXPECT(arena == scene.arena);
    for (std::size_t i = 0; i < scene.files.size(); ++i) EXPECT(scene.files[i]->read() == expected[i]);
}

}  // namespace

TEST(random_layouts_match_the_oracle) {
    std::mt19937_64 chance(7);
    for (int i = 0; i < 60; ++i) {
        const CopyOptions options{1U + i % 4U, i % 3 == 0 ? 1 : never, 1};
        same_as_oracle(chance, options, i % 2 == 0 ? Direction::store : Direction::retrieve, false);
    }
}

TEST(repeated_blocks_are_read_twice_and_the_last_write_stays) {
    std::mt19937_64 chance(8);
    for (int i = 0; i < 30; ++i) {
        same_as_oracle(chance, {4, i % 3 == 0 ? 1 : never, 1}, i % 2 == 0 ? Direction::store : Direction::retrieve,
                       true);
    }
}

TEST(more_runs_than_a_round_holds) {
    Scene scene = plain_scene(200000, 1, 100000, 300000);
    std::mt19937_64 chance(9);
    Bytes bytes(200000);
    fill(bytes, chance);
    scene.files[0]->write(bytes);
    std::vector<std::int64_t> ids(100000);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(199999 - 2 * i);
    const PieceWords piece{{{7, 100000}}, 0, 100000, {{0, ids}}};
    PieceWords second = piece;
    second.extents = {{150000, 100000}};
    HostCopier copier(scene.arena.data(), scene.arena.size(), {3, never, 1});
    EXPECT(copier.copy(scene.map(), words_of({piece, second}), Direction::store).completed == 2);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        EXPECT(scene.arena[7 + i] == bytes[199999 - 2 * i] && scene.arena[150000 + i] == bytes[199999 - 2 * i]);
    }
    EXPECT(scene.arena[6] == std::byte{0} && scene.arena[100007] == std::byte{0});
}

TEST(large_runs_are_shared_by_the_team) {
    constexpr std::uint64_t block = 1 << 20;
    Scene scene = plain_scene(4, block, 4, 4 * block + 100);
    std::mt19937_64 chance(10);
    Bytes bytes(4 * block);
    fill(bytes, chance);
    scene.files[0]->write(bytes);
    const PieceWords piece{{{33, 4 * block}}, 0, 4 * block, {{0, {2, 3, 0, 1}}}};
    for (const std::uint64_t stream_bytes : {std::uint64_t{1}, never}) {
        std::ranges::fill(scene.arena, std::byte{0});
        HostCopier copier(scene.arena.data(), scene.arena.size(), {4, stream_bytes, 1 << 15});
        EXPECT(copier.copy(scene.map(), words_of({piece}), Direction::store).completed == 1);
        EXPECT(std::memcmp(scene.arena.data() + 33, bytes.data() + 2 * block, 2 * block) == 0);
        EXPECT(std::memcmp(scene.arena.data() + 33 + 2 * block, bytes.data(), 2 * block) == 0);
        scene.files[0]->write(Bytes(4 * block));
        EXPECT(copier.copy(scene.map(), words_of({piece}), Direction::retrieve).completed == 1);
        EXPECT(scene.files[0]->read() == bytes);
    }
}

TEST(many_callers_share_one_team) {
    constexpr std::uint64_t block = 4096;
    constexpr std::uint64_t blocks = 64;
    constexpr int callers = 8;
    Bytes arena(callers * blocks * block);
    HostCopier copier(arena.data(), arena.size(), {4, never, 1});
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < callers; ++number) {
        threads.emplace_back([&, number] {
            const Scene scene = plain_scene(blocks, block, 8, 0);
            const Mapping mapping = scene.map();
            std::mt19937_64 chance(static_cast<std::uint64_t>(number));
            std::vector<PieceWords> slice;
            for (std::uint64_t i = 0; i < blocks / 8; ++i) {
                const std::uint64_t place = static_cast<std::uint64_t>(number) * blocks * block + i * 8 * block;
                slice.push_back({{{place, 8 * block}}, 0, 8 * block, {{0, {}}}});
                for (std::uint64_t b = 0; b < 8; ++b) {
                    slice.back().blocks[0].second.push_back(static_cast<std::int64_t>((i * 8 + b) * 5 % blocks));
                }
            }
            for (int round = 0; round < 8; ++round) {
                Bytes bytes(blocks * block, static_cast<std::byte>(chance()));
                bytes[static_cast<std::size_t>(round)] = std::byte{1};
                scene.files[0]->write(bytes);
                const Report stored = copier.copy(mapping, words_of(slice), Direction::store);
                scene.files[0]->write(Bytes(blocks * block));
                const Report loaded = copier.copy(mapping, words_of(slice), Direction::retrieve);
                if (stored.completed == 8 && loaded.completed == 8 && scene.files[0]->read() == bytes) ++right;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(right == callers * 8);
}

TEST(batches_that_read_the_same_blocks_at_once) {
    constexpr std::uint64_t block = 4096;
    const Scene scene = plain_scene(32, block, 32, 0);
    std::mt19937_64 chance(11);
    Bytes bytes(32 * block);
    fill(bytes, chance);
    scene.files[0]->write(bytes);
    const Mapping mapping = scene.map();
    Bytes arena(4 * 32 * block);
    HostCopier copier(arena.data(), arena.size(), {3, 1, 1});
    std::vector<std::int64_t> ids(32);
    for (std::size_t i = 0; i < 32; ++i) ids[i] = static_cast<std::int64_t>(i);
    std::vector<std::thread> threads;
    for (std::uint64_t n = 0; n < 4; ++n) {
        threads.emplace_back([&, n] {
            const PieceWords piece{{{n * 32 * block, 32 * block}}, 0, 32 * block, {{0, ids}}};
            for (int i = 0; i < 30; ++i) (void)copier.copy(mapping, words_of({piece}), Direction::store);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::uint64_t n = 0; n < 4; ++n)
        EXPECT(std::memcmp(arena.data() + n * 32 * block, bytes.data(), 32 * block) == 0);
}

TEST(what_lies_outside_is_refused_and_nothing_moves) {
    Scene scene = plain_scene(8, 16, 4, 200);
    scene.files[0]->write(Bytes(128, std::byte{7}));
    const Mapping mapping = scene.map();
    HostCopier copier(scene.arena.data(), scene.arena.size(), {1, never, 1});
    const PieceWords good{{{100, 64}}, 0, 64, {{0, {0, 1, 2, 3}}}};
    const auto refused = [&](PieceWords bad, const char* words) {
        // The good piece comes first: it must not have moved either.
        EXPECT_REFUSED(copier.copy(mapping, words_of({good, std::move(bad)}), Direction::store), words);
        EXPECT(scene.arena == Bytes(200));
    };
    refused({{{137, 64}}, 0, 64, {{0, {0}}}}, "outside the arena");
    refused({{{most, 64}}, 0, 64, {{0, {0}}}}, "negative");
    refused({{{100, never}}, 0, 64, {{0, {0}}}}, "outside the arena");
    refused({{{100, 63}}, 0, 64, {{0, {0}}}}, "shorter than the span");
    refused({{{100, 64}}, 0, 65, {{0, {0}}}}, "outside the object");
    refused({{{100, 64}}, 3, 2, {{0, {0}}}}, "outside the object");
    refused({{{100, 64}}, 0, 64, {{0, {8}}}}, "outside the engine");
    refused({{{100, 64}}, 0, 64, {{0, {-1}}}}, "outside the engine");
    refused({{{100, 64}}, 0, 64, {{1, {0, 1, 2, 3}}}}, "outside its chunk");
    refused({{{100, 64}}, 0, 64, {{5, {}}}}, "outside its chunk");
    refused({{{100, 64}}, 0, 64, {}}, "too early");
    refused({{{100, 64}}, 0, 64, {{0, {0}}, {0, {}}}}, "left over");
    std::vector<std::int64_t> words = words_of({good});
    for (std::size_t length = 0; length < words.size(); ++length) {
        EXPECT_REFUSED(copier.copy(mapping, std::span(words).first(length), Direction::store), "too early");
    }
    EXPECT(copier.copy(mapping, words, Direction::store).completed == 1);
}

TEST(words_at_random_move_nothing_outside) {
    std::mt19937_64 chance(12);
    Scene scene = plain_scene(8, 16, 4, 0);
    Bytes around(300, std::byte{9});
    HostCopier copier(around.data() + 50, 200, {2, never, 1});
    const Mapping mapping = scene.map();
    const std::vector<std::int64_t> good = words_of({{{{0, 30}, {90, 34}}, 5, 60, {{0, {0, 7, 2, 3}}}}});
    int taken = 0;
    for (int i = 0; i < 20000; ++i) {
        std::vector<std::int64_t> words = good;
        for (std::uint64_t n = up_to(chance, 2); n > 0; --n) {
            constexpr std::int64_t wild[] = {-1,
                                             0,
                                             1,
                                             8,
                                             64,
                                             199,
                                             200,
                                             std::numeric_limits<std::int64_t>::max(),
                                             std::numeric_limits<std::int64_t>::min()};
            words[up_to(chance, words.size() - 1)] = wild[up_to(chance, std::size(wild) - 1)];
        }
        try {
            taken += copier.copy(mapping, words, i % 2 == 0 ? Direction::store : Direction::retrieve).completed > 0;
        } catch (const BadRequest&) {
        }
    }
    EXPECT(taken > 1000);
    for (std::size_t i = 0; i < 50; ++i) EXPECT(around[i] == std::byte{9} && around[250 + i] == std::byte{9});
}

TEST(layouts_that_reach_outside_are_refused) {
    const Scene scene = plain_scene(8, 16, 4, 0);
    const auto mapped = [&](Window window, Group group) {
        std::vector<MappedFile> files;
        files.emplace_back(scene.files[0]->fd(), 16, 112);
        return Mapping(std::move(files), {window}, {std::move(group)});
    };
    const Window window{0, 16, 112};
    const Entry entry{0, 0, 1, 0, 1, 0, 16, 16};
    EXPECT(mapped(window, {7, 7, {entry}}).object_bytes() == 112);
    EXPECT_REFUSED(mapped({1, 16, 112}, {7, 7, {entry}}), "file");
    EXPECT_REFUSED(mapped({0, 15, 112}, {7, 7, {entry}}), "before");
    EXPECT_REFUSED(mapped({0, 16, 113}, {7, 7, {entry}}), "beyond");
    EXPECT_REFUSED(mapped({0, most, 112}, {7, 7, {entry}}), "beyond");
    EXPECT_REFUSED(mapped(window, {7, 8, {entry}}), "beyond its window");
    EXPECT_REFUSED(mapped(window, {0, 7, {entry}}), "without blocks");
    EXPECT_REFUSED(mapped(window, {7, 0, {entry}}), "without blocks");
    EXPECT_REFUSED(mapped(window, {7, 7, {{1, 0, 1, 0, 1, 0, 16, 16}}}), "window");
    EXPECT_REFUSED(mapped(window, {7, 7, {{0, 0, 0, 0, 1, 0, 16, 16}}}), "without layers");
    EXPECT_REFUSED(mapped(window, {7, 7, {{0, 0, 1, 0, 1, 0, 16, 0}}}), "without layers");
    EXPECT_REFUSED(mapped(window, {7, 7, {{0, 1, 1, 0, 1, 0, 16, 16}}}), "beyond its window");
    EXPECT_REFUSED(mapped(window, {7, 7, {{0, 0, 3, most / 2, 1, 0, 16, 16}}}), "64 bits");
    EXPECT_REFUSED(mapped(window, {7, 7, {{0, most, 1, 0, 1, 0, 16, 16}}}), "64 bits");
    EXPECT_REFUSED(mapped(window, {most, 7, {{0, 0, 1, 0, 1, 0, 16, 16}}}), "64 bits");
    EXPECT_REFUSED(MappedFile(scene.files[0]->fd(), 0, 0), "no bytes");
    EXPECT_REFUSED(MappedFile(scene.files[0]->fd(), most - 5, 10), "beyond");
}

}  // namespace kvgrpc::testing
