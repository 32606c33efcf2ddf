// SPDX-License-Identifier: Apache-2.0
// Copies slices between memory of a card and the arena, whose parts have been pinned.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "card.hpp"
#include "grid.hpp"
#include "host_copy.hpp"
#include "layout.hpp"
#include "plan.hpp"

namespace kvgrpc {

// How bytes move: by copy engines; by a kernel into a ring on the card and copy engines from there; by a kernel that
// reaches into the arena itself.
enum class Mode : int { dma, staged, direct };

// An engine's memory on a card and the paging in it of each part of a chunk, with a stream for each direction that all
// parts share. The memory is its opener's to close, after this has gone.
class DeviceMapping {
  public:
    DeviceMapping(std::shared_ptr<const Card> card, std::vector<Paging> parts, Mode mode);
    ~DeviceMapping();
    DeviceMapping(const DeviceMapping&) = delete;
    DeviceMapping& operator=(const DeviceMapping&) = delete;

    // Throws BadRequest.
    const Paging& part(std::size_t number) const;
    Mode mode() const noexcept { return mode_; }
    cuda::Stream stream(Direction direction) const noexcept { return streams_[static_cast<int>(direction)]->get(); }

  private:
    const std::shared_ptr<const Card> card_;
    const std::vector<Paging> parts_;
    const Mode mode_;
    std::array<std::unique_ptr<CardStream>, 2> streams_;
};

struct KernelOptions {
    cuda::Function function = nullptr;  // paged_copy of paged_copy.cu, loaded on the card
    unsigned staged_blocks = 32;        // thread blocks of a launch
    unsigned direct_blocks = 8;
};

// The ring of a direction has `steps` times `step_bytes`; it is taken at the first staged copy.
struct RingShape {
    std::uint64_t step_bytes = std::uint64_t{16} << 20;
    unsigned steps = 4;
};

class DeviceCopier;

// A slice that was launched.
class Flight {
  public:
    explicit Flight(DeviceCopier& copier, std::uint64_t pieces);
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    // Returns when nothing touches the slice's memory any more. A copy that failed is all torn: nobody knows how far it
    // came.
    Report wait();
    // What the driver said when it failed; after `wait`.
    const std::string& error() const noexcept { return error_; }

  private:
    friend class DeviceCopier;
    void fail(const std::string& error) noexcept;
    void give_tables() noexcept;

    DeviceCopier& copier_;
    Report report_;
    std::string error_;
    bool begun_ = false;
    bool over_ = false;
    std::unique_ptr<CardEvent> ended_;
    std::vector<void*> tables_;
};

// Threads: any number may launch and wait at once. Flights end before it does.
class DeviceCopier {
  public:
    // The arena's memory must outlive it. Memory is pinned in parts of `part_bytes`, and no copy may cross two.
    DeviceCopier(std::shared_ptr<const Card> card, std::byte* arena, std::uint64_t arena_bytes,
                 std::uint64_t part_bytes, RingShape shape);
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;

    void load(const KernelOptions& kernel);

    // Starts a slice (see read_slice) of one part. What the driver refuses is reported by the flight. Throws BadRequest
    // before anything has moved.
    std::unique_ptr<Flight> launch(const DeviceMapping& mapping, std::size_t part, std::span<const std::int64_t> words,
                                   Direction direction);

  private:
    friend class Flight;

    // What one warp copies. As in paged_copy.cu.
    struct Unit {
        cuda::Pointer engine;
        cuda::Pointer other;
        std::uint64_t length;
    };

    // A stretch of the ring that belongs to one of the arena.
    struct Stretch {
        std::byte* arena;
        cuda::Pointer ring;
        std::uint64_t length;
    };

    struct Step {
        cuda::Pointer ring = 0;
        cuda::Pointer units = 0;
        std::unique_ptr<CardEvent> full;
        std::unique_ptr<CardEvent> empty;
    };

    // What the kernels of one direction use, one launch after the other.
    struct Belt {
        std::mutex mutex;
        std::unique_ptr<CardStream> kernels;
        std::unique_ptr<CardStream> engines;
        std::vector<Step> steps;
        std::size_t next = 0;
        bool staged = false;  // there is a ring
    };

    void launch_dma(Flight& flight, cuda::Stream stream, std::span<const Run> runs, Direction direction);
    void launch_grids(Flight& flight, cuda::Stream stream, std::span<const Grid> grids, Direction direction);
    void launch_in_order(Flight& flight, cuda::Stream stream, std::span<const Run> runs, Direction direction);
    void launch_kernels(Flight& flight, std::span<const Run> runs, Direction direction, bool staged);
    void launch_step(Flight& flight, Belt& belt, std::span<const Unit> units, std::span<const Stretch> stretches,
                     Direction direction);
    void prepare(Belt& belt, bool staged);
    void* take_table();
    void give_table(void* table) noexcept;

    const std::shared_ptr<const Card> card_;
    std::byte* const arena_;
    const std::uint64_t arena_bytes_;
    const std::uint64_t part_bytes_;
    const RingShape shape_;
    KernelOptions kernel_;
    std::array<Belt, 2> belts_;
    std::mutex tables_mutex_;
    std::vector<void*> tables_;
};

}  // namespace kvgrpc
