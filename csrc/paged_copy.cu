// SPDX-License-Identifier: Apache-2.0
// Gathers and scatters runs: between an engine's blocks and a ring on the card, or the arena itself. Compiled when a card
// first needs it.

struct Unit {
    unsigned long long engine;
    unsigned long long other;
    unsigned long long length;
};

// One warp, `Word` after `Word`, four in flight a lane. Both addresses and the length are multiples of its size.
template <typename Word>
__device__ void move(unsigned long long target, unsigned long long source, unsigned long long length, unsigned lane) {
    const Word* from = reinterpret_cast<const Word*>(source);
    Word* to = reinterpret_cast<Word*>(target);
    const unsigned count = static_cast<unsigned>(length / sizeof(Word));
    unsigned at = lane;
    for (; at + 96 < count; at += 128) {
        const Word a = from[at], b = from[at + 32], c = from[at + 64], d = from[at + 96];
        to[at] = a;
        to[at + 32] = b;
        to[at + 64] = c;
        to[at + 96] = d;
    }
    for (; at < count; at += 32) to[at] = from[at];
}

// Each warp takes every n-th unit.
extern "C" __global__ void __launch_bounds__(512) paged_copy(const Unit* units, unsigned count, int to_engine) {
    const unsigned lane = threadIdx.x & 31;
    const unsigned warps = gridDim.x * (blockDim.x >> 5);
    for (unsigned i = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < count; i += warps) {
        const Unit unit = units[i];
        const unsigned long long target = to_engine ? unit.engine : unit.other;
        const unsigned long long source = to_engine ? unit.other : unit.engine;
        const unsigned long long odd = target | source | unit.length;
        if ((odd & 15) == 0) {
            move<uint4>(target, source, unit.length, lane);
        } else if ((odd & 3) == 0) {
            move<unsigned>(target, source, unit.length, lane);
        } else {
            move<unsigned char>(target, source, unit.length, lane);
        }
    }
}
