#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#define NPUFLEET_PAUSE() _mm_pause()
#else
#define NPUFLEET_PAUSE() sched_yield()
#endif

namespace npufleet {
namespace {

// A part of a layer lasts some microseconds to milliseconds: threads look for its end for about 50 us before they sleep.
constexpr int SPINS = 1500;

void futex_wait(std::atomic<int32_t> &word, int32_t seen) {
    syscall(SYS_futex, reinterpret_cast<int32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<int32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<int32_t *>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Waits until the word is no longer `seen`. Whoever changes it wakes the sleepers it is told of.
void await_change(std::atomic<int32_t> &word, int32_t seen, std::atomic<int32_t> &sleepers) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (word.load(std::memory_order_acquire) != seen) return;
        NPUFLEET_PAUSE();
    }
    sleepers.fetch_add(1);
    while (word.load() == seen) futex_wait(word, seen);
    sleepers.fetch_sub(1);
}

class Workers {
public:
    // Not the constructor: if a thread cannot be started, those before it go on sleeping in this object, which has to stay.
    void spawn(int count) {
        for (int index = 0; index < count; index++) std::thread([this, index] { loop(index + 1); }).detach();
    }

    void start(Team &team, const std::function<void(Team &, int)> &work) {
        team_ = &team;
        work_ = &work;
        left_.store(team.threads - 1, std::memory_order_relaxed);
        call_.fetch_add(1);
        if (sleepers_.load() > 0) futex_wake_all(call_);
    }

    void join() {
        for (int spin = 0; left_.load(std::memory_order_acquire) != 0; spin++) {
            if (spin < SPINS) {
                NPUFLEET_PAUSE();
            } else {
                sched_yield();
            }
        }
    }

private:
    void loop(int thread) {
        pthread_setname_np(pthread_self(), "npufleet-kernel");  // 15 characters are the most
        for (int32_t seen = 0;; seen = static_cast<int32_t>(static_cast<uint32_t>(seen) + 1)) {
            await_change(call_, seen, sleepers_);
            (*work_)(*team_, thread);
            left_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::atomic<int32_t> call_{0};
    std::atomic<int32_t> sleepers_{0};
    std::atomic<int32_t> left_{0};
    Team *team_ = nullptr;
    const std::function<void(Team &, int)> *work_ = nullptr;
};

std::mutex &gate() {
    static auto *one = new std::mutex;
    return *one;
}

struct Crew {
    std::unique_ptr<Team> team;
    Workers *workers = nullptr;  // never freed: its threads sleep in it
    pid_t process = 0;
};

std::vector<Crew> &crews() {
    // Never freed: a step may still run when the process ends.
    static auto *all = new std::vector<Crew>(Team::LIMIT + 1);
    return *all;
}

}  // namespace

Team::Team(int count) : threads(count) {}

void Team::wait(int thread) {
    Count &own = counts_[thread];
    // The parts of the phase before this one: everyone has left it, and nobody enters it again before the next wait.
    parts_[(own.phase + PHASES - 1) % PHASES][thread].taken.store(0, std::memory_order_relaxed);
    own.phase++;
    if (threads == 1) return;
    const int32_t seen = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.fetch_add(1);
        if (sleepers_.load() > 0) futex_wake_all(round_);
    } else {
        await_change(round_, seen, sleepers_);
    }
}

void run_on_team(int threads, const std::function<void(Team &, int)> &work) {
    if (threads > Team::LIMIT) threads = Team::LIMIT;
    if (threads < 1) threads = 1;
    std::lock_guard<std::mutex> alone(gate());
    Crew &crew = crews()[static_cast<size_t>(threads)];
    if (!crew.team || crew.process != getpid()) {
        // After a fork the child has none of its parent's threads.
        auto team = std::make_unique<Team>(threads);
        Workers *workers = new Workers;
        workers->spawn(threads - 1);
        crew.team = std::move(team), crew.workers = workers, crew.process = getpid();
    }
    if (threads == 1) {
        work(*crew.team, 0);
        return;
    }
    crew.workers->start(*crew.team, work);
    work(*crew.team, 0);
    crew.workers->join();
}

}  // namespace npufleet
