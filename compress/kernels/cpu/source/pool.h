// A small thread pool: work is a queue of chunks that threads take when they are free.
//
// Nobody waits for a thread that has no core: a neighbour that takes one costs that core, not the whole speed, as
// spinning barriers over statically split work do. Threads spin for a few microseconds between two pieces of work of
// one token and sleep after that.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "vector.h"

class Pool {
  public:
    explicit Pool(int threads) {
        for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
        }
        awake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Call task(chunk, thread) for every chunk below `count`, the caller taking its share. Returns when all are done.
    // Throws bad_alloc where one of them did.
    template <class Task>
    void run(int64_t count, const Task& task) {
        if (count <= 1 || workers_.empty()) {
            for (int64_t chunk = 0; chunk < count; ++chunk) task(chunk, 0);
            return;
        }
        // Closed while the work changes, so that no thread pairs the old epoch with the new count.
        const uint64_t last = state_.load() >> 32;
        state_.store(last << 32 | CLOSED);
        call_ = [](const void* context, int64_t chunk, int thread) {
            try {
                (*static_cast<const Task*>(context))(chunk, thread);
                return true;
            } catch (const std::bad_alloc&) {
                return false;
            }
        };
        context_ = &task;
        count_.store(static_cast<uint32_t>(count));
        done_.store(0);
        const uint64_t epoch = (last + 1) & CLOSED;
        state_.store(epoch << 32);
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            awake_.notify_all();
        }
        take_chunks(static_cast<uint32_t>(epoch), 0);
        wait_until_done();
        if (failed_.exchange(false)) throw std::bad_alloc();
    }

  private:
    static constexpr uint64_t CLOSED = 0xffffffff;
    static constexpr auto PATIENCE = std::chrono::microseconds(50);

    // Take chunks of one epoch until none is left. A chunk is taken by counting up a word that holds the epoch too: a
    // thread that comes late can never take a chunk of another piece of work by mistake.
    void take_chunks(uint32_t epoch, int thread) {
        uint64_t state = state_.load();
        while (static_cast<uint32_t>(state >> 32) == epoch && static_cast<uint32_t>(state) < count_) {
            if (!state_.compare_exchange_weak(state, state + 1)) continue;
            if (!call_(context_, static_cast<int64_t>(static_cast<uint32_t>(state)), thread)) failed_.store(true);
            if (done_.fetch_add(1) + 1 == count_ && waiting_.load()) {
                { std::lock_guard<std::mutex> lock(mutex_); }
                finished_.notify_one();
            }
            state = state_.load();
        }
    }

    void wait_until_done() {
        if (spin([this] { return done_.load() == count_; })) return;
        waiting_.store(true);
        {
            std::unique_lock<std::mutex> lock(mutex_);
            finished_.wait(lock, [this] { return done_.load() == count_; });
        }
        waiting_.store(false);
    }

    void work(int thread) {
        uint32_t seen = 0;
        const auto changed = [&] { return epoch() != seen || stopping_.load(); };
        while (!stopping_.load()) {
            if (!spin(changed)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                awake_.wait(lock, changed);
                sleepers_.fetch_sub(1);
            }
            seen = epoch();
            take_chunks(seen, thread);
        }
    }

    uint32_t epoch() const { return static_cast<uint32_t>(state_.load() >> 32); }

    // Whether `ready` came true before patience ran out.
    template <class Ready>
    static bool spin(const Ready& ready) {
        const auto end = std::chrono::steady_clock::now() + PATIENCE;
        do {
            for (int round = 0; round < 16; ++round) {
                if (ready()) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
        return ready();
    }

    using Call = bool (*)(const void*, int64_t, int);
    Call call_ = nullptr;
    const void* context_ = nullptr;
    std::atomic<uint32_t> count_{0};
    alignas(64) std::atomic<uint64_t> state_{0};  // epoch << 32 | next chunk
    alignas(64) std::atomic<uint32_t> done_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> waiting_{false}, stopping_{false}, failed_{false};
    std::mutex mutex_;
    std::condition_variable awake_, finished_;
    std::vector<std::thread> workers_;
};
