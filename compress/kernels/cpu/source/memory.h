// Memory that kernels work in: buffers that start on a cache line, and rows that do not get into each other's way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

constexpr size_t CACHE_LINE = 64;

// Allocates from a cache line's start on: else every load and store of 64 bytes touches two lines.
template <class Number>
struct LineAllocator {
    using value_type = Number;
    LineAllocator() = default;
    template <class Other>
    LineAllocator(const LineAllocator<Other>&) {}
    Number* allocate(size_t count) {
        return static_cast<Number*>(::operator new(count * sizeof(Number), std::align_val_t{CACHE_LINE}));
    }
    void deallocate(Number* numbers, size_t) { ::operator delete(numbers, std::align_val_t{CACHE_LINE}); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <class Number>
using Buffer = std::vector<Number, LineAllocator<Number>>;

// The buffer's start, once it holds `size` numbers.
template <class Number>
static inline Number* room(Buffer<Number>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(static_cast<size_t>(size));
    return buffer.data();
}

// Floats from row to row of a buffer for `width` of them: an odd number of lines, since the first-level cache keeps
// lines that lie a power of two apart in a few places, from which tall tiles would push each other out.
static inline int64_t spread(int64_t width) {
    constexpr int64_t LINE = CACHE_LINE / sizeof(float);
    return ((width + LINE - 1) / LINE | 1) * LINE;
}
