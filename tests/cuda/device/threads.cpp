// The threads of a block as fibres on one thread of the host.
//
// A thread runs until it waits for others; who runs next is drawn at random, from a seed, so that what a missing barrier
// leaves to chance comes out differently than it should. Blocks run one after the other, in random order as well.
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "device.h"

namespace standin {
namespace {

constexpr size_t kStack = 256 << 10;  // bytes; local arrays of a thread lie there
constexpr size_t kSignalStack = 64 << 10;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kAsksWhoIsActive, kDone };

struct Thread {
  State state;
  unsigned lanes;  // that a warp's barrier waits for; or, as an answer, those that are active
  void* handed_in;
};

// A stack with a guard page, and where its thread goes on. Made once, used by the thread of this number in all blocks.
struct Fibre {
  ucontext_t first;
  jmp_buf here;
  bool has_begun = false;
  char* stack;

  Fibre() {
    const size_t guard = sysconf(_SC_PAGESIZE);
    stack = static_cast<char*>(mmap(nullptr, guard + kStack, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    mprotect(stack, guard, PROT_NONE);
    getcontext(&first);
    first.uc_stack.ss_sp = stack + guard;
    first.uc_stack.ss_size = kStack;
    first.uc_link = nullptr;
  }

  bool guards(const void* address) const { return address >= stack && address < stack + sysconf(_SC_PAGESIZE); }
};

std::vector<std::unique_ptr<Fibre>> fibres;
std::vector<Thread> threads;
std::vector<int> ready;
int current = -1;  // the thread that runs
void* handed[kMaxThreads / kWarp][kWarp];

jmp_buf scheduler;
sigjmp_buf rescue;  // out of a kernel that went wrong
std::string complaint;

const Kernel* kernel;
void** arguments;
Dim3 thread_at, block_at, size_of_block, size_of_grid;
std::minstd_rand chance;
std::mutex one_kernel_at_a_time;

std::string text(Dim3 at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

std::string who() {
  return "kernel " + kernel->name + ", block " + text(block_at) + ", thread " + text(thread_at) + " ";
}

void run_blocks_threads() {
  for (;;) {
    kernel->entry(arguments);
    threads[current].state = State::kDone;
    if (!_setjmp(fibres[current]->here)) _longjmp(scheduler, 1);
  }
}

void resume(int number) {
  current = number;
  const unsigned x = size_of_block.x, y = size_of_block.y;
  thread_at = {number % x, number / x % y, number / (x * y)};
  Fibre& fibre = *fibres[number];
  if (_setjmp(scheduler)) return;
  if (fibre.has_begun) _longjmp(fibre.here, 1);
  fibre.has_begun = true;
  makecontext(&fibre.first, run_blocks_threads, 0);
  setcontext(&fibre.first);
}

// The running thread waits until the scheduler lets it go on.
void wait(State state) {
  threads[current].state = state;
  if (!_setjmp(fibres[current]->here)) _longjmp(scheduler, 1);
}

void let_go(int number) {
  threads[number].state = State::kReady;
  ready.push_back(number);
}

int warp_of(int number) { return number / kWarp * kWarp; }

int end_of_warp(int first) { return std::min<int>(first + kWarp, threads.size()); }

// The lanes of a warp in which a condition holds.
unsigned lanes_where(int first, const std::function<bool(const Thread&)>& holds) {
  unsigned found = 0;
  for (int number = first; number < end_of_warp(first); number++)
    if (holds(threads[number])) found |= 1u << (number - first);
  return found;
}

// Threads of a warp whose barrier all that it waits for have reached, or have ended before.
bool release_warp_barrier(int first) {
  const unsigned there = lanes_where(first, [](const Thread& t) { return t.state == State::kAtWarpBarrier; });
  const unsigned living = lanes_where(first, [](const Thread& t) { return t.state != State::kDone; });
  for (int number = first; number < end_of_warp(first); number++) {
    const Thread waiting = threads[number];
    if (waiting.state != State::kAtWarpBarrier || (waiting.lanes & living & ~there)) continue;
    for (int other = first; other < end_of_warp(first); other++)
      if ((waiting.lanes >> (other - first) & 1) && threads[other].state == State::kAtWarpBarrier) let_go(other);
    return true;
  }
  return false;
}

// Which threads of a warp are active is asked where they run side by side, so that all that can come have come.
bool answer_who_is_active(int first) {
  const unsigned active = lanes_where(first, [](const Thread& t) { return t.state == State::kAsksWhoIsActive; });
  for (int number = first; number < end_of_warp(first); number++)
    if (active >> (number - first) & 1) {
      threads[number].lanes = active;
      let_go(number);
    }
  return active;
}

bool release_block_barrier() {
  for (const Thread& thread : threads)
    if (thread.state != State::kAtBlockBarrier && thread.state != State::kDone) return false;
  for (size_t number = 0; number < threads.size(); number++)
    if (threads[number].state == State::kAtBlockBarrier) let_go(number);
  return !ready.empty();
}

bool somebody_can_go_on() {
  for (size_t first = 0; first < threads.size(); first += kWarp) release_warp_barrier(first);
  if (ready.empty())
    for (size_t first = 0; first < threads.size(); first += kWarp) answer_who_is_active(first);
  return !ready.empty() || release_block_barrier();
}

void run_block(size_t dynamic_bytes) {
  begin_shared(dynamic_bytes);
  const int count = size_of_block.count();
  threads.assign(count, Thread{State::kReady, 0, nullptr});
  ready.resize(count);
  std::iota(ready.begin(), ready.end(), 0);
  while (!ready.empty() || somebody_can_go_on()) {
    std::swap(ready[chance() % ready.size()], ready.back());
    const int next = ready.back();
    ready.pop_back();
    resume(next);
  }
  current = -1;
  for (int number = 0; number < count; number++)
    if (threads[number].state != State::kDone) {
      current = number;
      complaint = who() + "waits for threads that never come, as others of its block do";
      siglongjmp(rescue, 1);
    }
  std::string harm;
  damaged_shared(&harm);
  if (!harm.empty()) {
    complaint = "kernel " + kernel->name + ", block " + text(block_at) + ", " + harm;
    siglongjmp(rescue, 1);
  }
}

void run_grid(size_t dynamic_bytes) {
  std::vector<size_t> blocks(size_of_grid.count());
  std::iota(blocks.begin(), blocks.end(), size_t(0));
  std::shuffle(blocks.begin(), blocks.end(), chance);
  const size_t x = size_of_grid.x, y = size_of_grid.y;
  for (size_t number : blocks) {
    block_at = {unsigned(number % x), unsigned(number / x % y), unsigned(number / (x * y))};
    run_block(dynamic_bytes);
  }
}

// Why the device could not run the kernel at all; empty if it could.
std::string unfit(Dim3 grid, Dim3 block, size_t dynamic_bytes, size_t dynamic_limit) {
  if (!grid.count() || !block.count()) return "a grid or a block is empty";
  if (block.count() > kMaxThreads) return "a block has " + std::to_string(block.count()) + " threads";
  if (block.z > 64) return "a block's z is " + std::to_string(block.z);
  if (grid.y > 65535 || grid.z > 65535) return "the grid's y and z are " + text(grid);
  if (dynamic_bytes > dynamic_limit)
    return "a block asks for " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory, and may have " +
           std::to_string(dynamic_limit);
  return "";
}

// A signal handler: the thread that runs did what it must not.
void caught(int signal, siginfo_t* info, void* context) {
  if (signal == SIGSEGV || signal == SIGBUS) {
    const bool is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
    complaint = who() + (current >= 0 && fibres[current]->guards(info->si_addr)
                             ? "needs too much of a stack"
                             : explain(info->si_addr, is_write));
  } else if (signal == SIGFPE) {
    complaint = who() + "divided an integer by zero";
  } else {
    complaint = who() + "read or wrote a local array out of its bounds";
  }
  siglongjmp(rescue, 1);
}

// While kernels run, their faults are caught, on a stack of their own.
class Catching {
 public:
  Catching() {
    static char stack[kSignalStack];
    stack_t ours{};
    ours.ss_sp = stack;
    ours.ss_size = sizeof stack;
    sigaltstack(&ours, &stack_before_);
    struct sigaction action {};
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int n = 0; n < 4; n++) sigaction(kSignals[n], &action, &before_[n]);
  }
  ~Catching() {
    for (int n = 0; n < 4; n++) sigaction(kSignals[n], &before_[n], nullptr);
    sigaltstack(&stack_before_, nullptr);
  }

 private:
  static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  struct sigaction before_[4];
  stack_t stack_before_;
};

}  // namespace

int launch(const Kernel& which, Dim3 grid, Dim3 block, size_t dynamic_bytes, void** given) {
  const std::lock_guard<std::mutex> lock(one_kernel_at_a_time);
  if (int error = broken()) return error;
  const std::string why = unfit(grid, block, dynamic_bytes, which.dynamic_limit);
  if (!why.empty()) return fail(kInvalidConfiguration, "kernel " + which.name + ": " + why);

  kernel = &which, arguments = given;
  size_of_grid = grid, size_of_block = block;
  while (fibres.size() < block.count()) fibres.push_back(std::make_unique<Fibre>());
  const char* seed = getenv("STANDIN_SEED");
  chance.seed(1 + (seed ? atoi(seed) : 0));

  const int device = current_device();
  open_memory(device);
  {
    const Catching faults;
    if (sigsetjmp(rescue, 1)) {
      close_memory(device);
      return fail_for_good(kIllegalAddress, complaint);
    }
    run_grid(dynamic_bytes);
  }
  std::string harm;
  damaged(&harm);
  close_memory(device);
  return harm.empty() ? int(kSuccess) : fail_for_good(kIllegalAddress, "kernel " + which.name + " " + harm);
}

Dim3& thread_index() { return thread_at; }
Dim3& block_index() { return block_at; }
Dim3& block_size() { return size_of_block; }
Dim3& grid_size() { return size_of_grid; }

int lane() { return current % kWarp; }

void sync_block() { wait(State::kAtBlockBarrier); }

void sync_warp(unsigned lanes) {
  threads[current].lanes = lanes;
  wait(State::kAtWarpBarrier);
}

unsigned active_lanes() {
  wait(State::kAsksWhoIsActive);
  return threads[current].lanes;
}

void** exchange(void* mine, unsigned lanes) {
  threads[current].handed_in = mine;
  sync_warp(lanes);
  const int first = warp_of(current);
  void** found = handed[first / kWarp];
  for (int number = first; number < first + kWarp; number++) {
    const bool takes_part = (lanes >> (number - first) & 1) && number < int(threads.size());
    found[number - first] = takes_part ? threads[number].handed_in : nullptr;
  }
  return found;
}

void trap(const char* why) {
  complaint = who() + why;
  siglongjmp(rescue, 1);
}

}  // namespace standin
