// Memory that a thread keeps from task to task.
#pragma once

#include <cstddef>
#include <cstdint>

namespace relpos {

class Scratch {
 public:
  // this thread's; what its earlier tasks took is free again
  static Scratch& of_this_thread();
  // has this thread give back what is more than it should keep
  static void trim();

  // always inline: a copy outside would be one for all instruction sets, and the linker would choose whose
  template <class S>
  __attribute__((always_inline)) S* take(int64_t count) {  // aligned to 64 bytes, not set to anything
    return static_cast<S*>(bytes(size_t(count) * sizeof(S)));
  }

  struct Block;
  struct Mark {
    Block* block;
    size_t used;
  };
  Mark mark() const;
  void back_to(Mark mark);  // what was taken since is free again

 private:
  Block* first_ = nullptr;
  Block* current_ = nullptr;

  Scratch() = default;
  ~Scratch();
  static Scratch& here();
  void* bytes(size_t size);
  void release();
};

}  // namespace relpos
