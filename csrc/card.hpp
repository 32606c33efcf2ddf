// SPDX-License-Identifier: Apache-2.0
// One NVIDIA card: its context, memory of other processes that is open on it, pinned host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.hpp"

namespace kvgrpc {

// A card that the driver sees. `uuid` is "GPU-..." as nvidia-smi prints it.
struct CardFacts {
    int ordinal;
    std::string uuid;
    std::string name;
    std::string bus_id;
};

// Throws NoDriver or CudaError.
std::vector<CardFacts> list_cards();

// The context that is current for the calling thread; null for none, also where there is no driver.
cuda::Context current_context() noexcept;
// Makes it current for the calling thread. Where that fails, what the thread does next says so.
void use_context(cuda::Context context) noexcept;

// The card's primary context, retained for as long as this lives. Threads: any.
class Card {
  public:
    explicit Card(int ordinal);
    ~Card();
    Card(const Card&) = delete;
    Card& operator=(const Card&) = delete;

    // Makes the context current for the calling thread, until the end of the scope. Where that fails, as after the
    // driver's own end, the calls in the scope say so.
    class Current {
      public:
        explicit Current(const Card& card) noexcept;
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        bool pushed_;
    };

    // The address at which the allocation behind a handle of another process is open here, and its size.
    std::pair<cuda::Pointer, std::uint64_t> open(const cuda::MemHandle& handle) const;
    void close(cuda::Pointer pointer) const;

    // Locks host memory for all cards, so that copy engines reach it.
    void pin(std::byte* start, std::uint64_t size) const;
    void unpin(std::byte* start) const;

    // Free and all memory in bytes.
    std::pair<std::uint64_t, std::uint64_t> memory() const;

  private:
    int ordinal_;
    cuda::Context context_ = nullptr;
};

// A stream that waits for no other.
class CardStream {
  public:
    CardStream();
    ~CardStream();
    CardStream(const CardStream&) = delete;
    CardStream& operator=(const CardStream&) = delete;
    cuda::Stream get() const noexcept { return stream_; }

  private:
    cuda::Stream stream_ = nullptr;
};

class CardEvent {
  public:
    CardEvent();
    ~CardEvent();
    CardEvent(const CardEvent&) = delete;
    CardEvent& operator=(const CardEvent&) = delete;
    cuda::Event get() const noexcept { return event_; }

  private:
    cuda::Event event_ = nullptr;
};

// An event of another process, open here. What it says is of its latest record at that moment.
class IpcEvent {
  public:
    // Throws CudaError for what is no handle of an event of another process that lives and can be reached from here.
    IpcEvent(std::shared_ptr<const Card> card, const cuda::EventHandle& handle);
    ~IpcEvent();
    IpcEvent(const IpcEvent&) = delete;
    IpcEvent& operator=(const IpcEvent&) = delete;

    // Whether all has ended that was launched before it was recorded. Throws CudaError.
    bool is_over() const;

  private:
    const std::shared_ptr<const Card> card_;
    cuda::Event event_ = nullptr;
};

// What another process needs to open memory of this one.
struct Exported {
    cuda::MemHandle handle;
    std::string uuid;
    std::uint64_t offset;  // of the pointer inside the allocation
    std::uint64_t size;    // of the allocation
};

// Throws BadRequest with a sentence that says why this memory cannot be shared.
Exported export_memory(cuda::Pointer pointer);

}  // namespace kvgrpc
