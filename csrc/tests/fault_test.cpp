// SPDX-License-Identifier: Apache-2.0
// Memory that goes away: the copy fails and says where, the process lives, and foreign signals stay foreign.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "../bus_guard.hpp"
#include "scene.hpp"
#include "testing.hpp"

namespace kvgrpc::testing {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t never = std::uint64_t{1} << 60;
constexpr Direction both[] = {Direction::store, Direction::retrieve};

// Pieces of `run` blocks of a page each, at the same places on both sides.
std::vector<PieceWords> pages_in_pieces(std::uint64_t pages, std::uint64_t run) {
    std::vector<PieceWords> slice;
    for (std::uint64_t i = 0; i < pages; i += run) {
        slice.push_back({{{i * page, run * page}}, 0, run * page, {{0, {}}}});
        // Last to first, so that no two runs are adjacent on both sides.
        for (std::uint64_t b = run; b > 0; --b)
            slice.back().blocks[0].second.push_back(static_cast<std::int64_t>(i + b - 1));
    }
    return slice;
}

bool operator==(const Report& a, const Report& b) {
    return a.completed == b.completed && a.stop == b.stop && a.torn == b.torn;
}

}  // namespace

TEST(truncated_before_the_copy_is_not_torn) {
    for (const Direction direction : both) {
        for (const std::uint64_t left : {std::uint64_t{0}, std::uint64_t{100}, page + 1}) {
            Scene scene = plain_scene(4, page, 2, 4 * page);
            scene.files[0]->write(Bytes(4 * page, std::byte{5}));
            const Mapping mapping = scene.map();
            scene.files[0]->truncate(left);
            HostCopier copier(scene.arena.data(), scene.arena.size(), {4, never, 1});
            const Report report = copier.copy(mapping, words_of(pages_in_pieces(4, 2)), direction);
            EXPECT((report == Report{0, Stop::truncated, false}));
            EXPECT(scene.arena == Bytes(4 * page));
            EXPECT(scene.files[0]->read() == Bytes(left, std::byte{5}));
        }
    }
}

TEST(truncated_between_two_runs_is_exact) {
    for (const Direction direction : both) {
        for (std::uint64_t after = 0; after < 8; ++after) {
            Scene scene = plain_scene(8, page, 2, 8 * page);
            const Mapping mapping = scene.map();
            HostCopier copier(scene.arena.data(), scene.arena.size(), {4, never, 1});
            std::uint64_t paced = 0;
            const auto pace = [&] {
                if (paced++ == after) scene.files[0]->truncate(0);
            };
            const Report report = copier.copy(mapping, words_of(pages_in_pieces(8, 2)), direction, pace);
            EXPECT((report == Report{after / 2, Stop::truncated, after % 2 == 1}));
            EXPECT(scene.files[0]->size_now() == 0);
        }
    }
}

TEST(a_pace_that_throws_ends_the_copy) {
    Scene scene = plain_scene(4, page, 2, 4 * page);
    const Mapping mapping = scene.map();
    HostCopier copier(scene.arena.data(), scene.arena.size(), {4, never, 1});
    bool thrown = false;
    try {
        (void)copier.copy(mapping, words_of(pages_in_pieces(4, 2)), Direction::store,
                          [] { throw std::runtime_error("no"); });
    } catch (const std::runtime_error&) {
        thrown = true;
    }
    EXPECT(thrown);
    EXPECT(copier.copy(mapping, words_of(pages_in_pieces(4, 2)), Direction::store).completed == 2);
}

// An engine truncates at any instant; what the report says must be what happened.
TEST(truncated_in_mid_copy_by_another_thread) {
    constexpr std::uint64_t pages = 128;
    constexpr std::uint64_t run = 16;
    std::mt19937_64 chance(3);
    std::uint64_t failed = 0;
    for (int i = 0; i < 40; ++i) {
        const Direction direction = both[i % 2];
        Scene scene = plain_scene(pages, page, run, pages * page);
        const std::byte there{1};
        const std::byte copied{2};
        scene.files[0]->write(Bytes(pages * page, direction == Direction::store ? copied : there));
        std::ranges::fill(scene.arena, direction == Direction::store ? there : copied);
        const Mapping mapping = scene.map();
        HostCopier copier(scene.arena.data(), scene.arena.size(), {4, i % 3 == 0 ? 1 : never, 1});
        const std::uint64_t left = up_to(chance, pages * page / 2);
        std::atomic<bool> go{false};
        std::thread engine([&, wait = up_to(chance, 20000)] {
            while (!go) {
            }
            for (std::uint64_t n = 0; n < wait; ++n) asm volatile("" ::: "memory");
            scene.files[0]->truncate(left);
        });
        go = true;
        const Report report = copier.copy(mapping, words_of(pages_in_pieces(pages, run)), direction);
        engine.join();
        EXPECT(scene.files[0]->size_now() == left);
        const Bytes& target = direction == Direction::store ? scene.arena : scene.files[0]->read();
        const auto bytes_are = [&](std::uint64_t first, std::uint64_t end, std::byte value) {
            for (std::uint64_t at = first; at < std::min<std::uint64_t>(end, target.size()); ++at) {
                if (target[at] != value) return false;
            }
            return true;
        };
        const std::uint64_t done = report.completed * run * page;
        EXPECT(bytes_are(0, done, copied));
        if (report.completed < pages / run) {
            ++failed;
            EXPECT(report.stop == Stop::truncated);
            if (direction == Direction::retrieve) {
                EXPECT(bytes_are(done + (report.torn ? run * page : 0), pages * page, there));
            } else if (!report.torn) {
                EXPECT(bytes_are(done, done + run * page, there));
            }
        }
    }
    EXPECT(failed > 5);
}

TEST(many_engines_truncate_at_once) {
    constexpr std::uint64_t pages = 64;
    Bytes arena(8 * pages * page);
    HostCopier copier(arena.data(), arena.size(), {4, never, 1});
    std::vector<std::thread> threads;
    for (std::uint64_t n = 0; n < 8; ++n) {
        threads.emplace_back([&, n] {
            std::mt19937_64 chance(n);
            for (int i = 0; i < 25; ++i) {
                const Scene scene = plain_scene(pages, page, 8, 0);
                const Mapping mapping = scene.map();
                std::vector<PieceWords> slice = pages_in_pieces(pages, 8);
                for (PieceWords& piece : slice) piece.extents[0].first += n * pages * page;
                std::thread engine([&, left = up_to(chance, pages * page)] { scene.files[0]->truncate(left); });
                const Report report = copier.copy(mapping, words_of(slice), both[i % 2]);
                engine.join();
                EXPECT(report.completed == 8 || report.stop == Stop::truncated);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

namespace {

sigjmp_buf elsewhere;
std::atomic<int> seen{0};

void note_and_leave(int) {
    ++seen;
    siglongjmp(elsewhere, 1);
}

// A SIGBUS in this thread that no guard covers.
void fault_outside() {
    const File file(page);
    void* memory = mmap(nullptr, page, PROT_READ, MAP_SHARED, file.fd(), 0);
    file.truncate(0);
    if (sigsetjmp(elsewhere, 1) == 0) (void)*static_cast<volatile char*>(memory);
    munmap(memory, page);
}

void install_noting_handler() {
    struct sigaction action = {};
    action.sa_handler = note_and_leave;
    action.sa_flags = SA_NODEFER;
    EXPECT(sigaction(SIGBUS, &action, nullptr) == 0);
}

bool a_guarded_touch_survives() {
    const File file(page);
    const MappedFile mapped(file.fd(), 0, page);
    BusGuard::install();
    BusGuard guard;
    if (sigsetjmp(guard.jump, 0) == 0) {
        file.truncate(0);
        guard.watch(mapped.at(0), nullptr, page);
        (void)*reinterpret_cast<const volatile char*>(mapped.at(0));
    }
    return guard.fault() == BusFault::engine;
}

// The body in a process of its own: how it ended.
int ended_by(void (*body)()) {
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        body();
        _exit(0);
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

}  // namespace

TEST(foreign_faults_go_to_the_handler_that_was_there) {
    struct sigaction before = {};
    sigaction(SIGBUS, nullptr, &before);
    install_noting_handler();
    EXPECT(a_guarded_touch_survives());
    EXPECT(seen == 0);
    fault_outside();
    EXPECT(seen == 1);
    install_noting_handler();  // somebody replaces the handler while the server runs
    EXPECT(a_guarded_touch_survives());
    fault_outside();
    EXPECT(seen == 2);
    fault_outside();
    EXPECT(seen == 3);
    sigaction(SIGBUS, &before, nullptr);
}

TEST(foreign_faults_end_the_process_as_they_would_have) {
    EXPECT(ended_by([] {
               struct sigaction action = {};
               action.sa_handler = SIG_DFL;
               sigaction(SIGBUS, &action, nullptr);
               EXPECT(a_guarded_touch_survives());
               fault_outside();
           }) == SIGBUS);
    EXPECT(ended_by([] {
               struct sigaction action = {};
               action.sa_handler = SIG_DFL;
               sigaction(SIGBUS, &action, nullptr);
               EXPECT(a_guarded_touch_survives());
               raise(SIGBUS);
           }) == SIGBUS);
    // One that puts back what was there and raises again, while that is this very handler.
    EXPECT(ended_by([] {
               BusGuard::install();
               struct sigaction action = {};
               action.sa_handler = [](int signal) { raise(signal); };
               action.sa_flags = SA_NODEFER;
               sigaction(SIGBUS, &action, nullptr);
               EXPECT(a_guarded_touch_survives());
               fault_outside();
           }) == SIGBUS);
}

TEST(touching_changes_nothing_and_populating_allocates_nothing) {
    const File file(1 << 20);
    file.write(Bytes(64 << 10, std::byte{3}));
    const MappedFile mapped(file.fd(), 0, 1 << 20);
    const auto allocated = [&] {
        std::uint64_t bytes = 0;
        for (off_t at = 0; (at = lseek(file.fd(), at, SEEK_DATA)) >= 0;) {
            const off_t hole = lseek(file.fd(), at, SEEK_HOLE);
            bytes += static_cast<std::uint64_t>(hole - at);
            at = hole;
        }
        return bytes;
    };
    mapped.populate(std::chrono::steady_clock::now() + std::chrono::seconds(5));
    EXPECT(allocated() == 64 << 10);
    EXPECT(touch(mapped.at(100), 100000));
    EXPECT(file.read() == [] {
        Bytes bytes(1 << 20);
        std::ranges::fill_n(bytes.begin(), 64 << 10, std::byte{3});
        return bytes;
    }());
    EXPECT(allocated() == 102400);
}

}  // namespace kvgrpc::testing
