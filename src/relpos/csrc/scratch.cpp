#include "scratch.h"

#include <new>

// AddressSanitizer then reports any access to memory that was not taken; without it these do nothing
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size) ((void)(start), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(start, size) ((void)(start), (void)(size))
#endif

namespace relpos {

namespace {
#ifdef __SANITIZE_ADDRESS__
constexpr size_t GAP = 64;  // between two pieces that a task takes
#else
constexpr size_t GAP = 0;
#endif
constexpr std::align_val_t ALIGNMENT{64};
constexpr size_t HEADER = 64, SMALLEST = size_t(512) << 10, KEPT = size_t(4) << 20;
}  // namespace

struct Scratch::Block {
  Block* next;
  size_t size, used;
};

Scratch& Scratch::here() {
  static thread_local Scratch scratch;
  return scratch;
}

Scratch& Scratch::of_this_thread() {
  here().back_to({nullptr, 0});
  return here();
}

void Scratch::trim() {
  size_t total = 0;
  for (Block* block = here().first_; block; block = block->next) total += block->size;
  if (total > KEPT) here().release();
}

void* Scratch::bytes(size_t size) {
  const size_t asked = size;
  size = (size + 63) / 64 * 64 + GAP;
  while (!current_ || current_->used + size > current_->size) {
    Block*& next = current_ ? current_->next : first_;
    if (!next) {
      const size_t room = size > SMALLEST ? size : SMALLEST;
      next = new (::operator new(HEADER + room, ALIGNMENT)) Block{nullptr, room, 0};
    }
    current_ = next;
    current_->used = 0;
  }
  void* start = reinterpret_cast<char*>(current_) + HEADER + current_->used;
  ASAN_POISON_MEMORY_REGION(start, current_->size - current_->used);
  current_->used += size;
  ASAN_UNPOISON_MEMORY_REGION(start, asked);
  return start;
}

Scratch::Mark Scratch::mark() const { return {current_, current_ ? current_->used : 0}; }

void Scratch::back_to(Mark mark) {
  current_ = mark.block;
  if (current_) current_->used = mark.used;
}

void Scratch::release() {
  while (first_) {
    Block* next = first_->next;
    ASAN_UNPOISON_MEMORY_REGION(first_, HEADER + first_->size);
    ::operator delete(first_, ALIGNMENT);
    first_ = next;
  }
  current_ = nullptr;
}

Scratch::~Scratch() { release(); }

}  // namespace relpos
