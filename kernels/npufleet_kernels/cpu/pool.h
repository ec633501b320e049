// Threads that compute a step together: all run the same function, share out the tasks of each part, and wait for each other after it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace npufleet {

class Team {
public:
    explicit Team(int threads);
    // Tasks [0, count), each done once by some thread; returns on every thread once all are done. Called by all threads alike. A thread
    // begins with its own share, which lies together, and then helps the others.
    template <class Work>
    void share(int thread, int64_t count, const Work &work) {
        Part *parts = parts_[phase_of(thread)];
        for (int helped = 0; helped < threads; helped++) {
            const int owner = (thread + helped) % threads;
            const int64_t end = count * (owner + 1) / threads;
            for (;;) {
                const int64_t task = count * owner / threads + parts[owner].taken.fetch_add(1, std::memory_order_relaxed);
                if (task >= end) break;
                work(task);
            }
        }
        wait(thread);
    }

    const int threads;

private:
    static constexpr int MOST_THREADS = 256;
    static constexpr int PHASES = 3;
    struct alignas(64) Part {
        std::atomic<int64_t> taken{0};
    };
    struct alignas(64) Count {
        int64_t phase = 0;
    };

    int phase_of(int thread) { return static_cast<int>(counts_[thread].phase % PHASES); }
    void wait(int thread);

    Part parts_[PHASES][MOST_THREADS];
    Count counts_[MOST_THREADS];
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<int32_t> round_{0};
    std::atomic<int32_t> sleepers_{0};

public:
    static constexpr int LIMIT = MOST_THREADS;
};

// Runs `work(team, thread)` on `threads` threads, the caller among them. One caller at a time; others wait. Threads that have nothing to
// do sleep in the kernel after a bounded while, so that an idle process takes no CPU.
void run_on_team(int threads, const std::function<void(Team &, int)> &work);

}  // namespace npufleet
