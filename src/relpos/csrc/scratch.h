// Memory that a thread keeps from task to task.
#pragma once

#include <cstddef>
#include <cstdint>

namespace relpos {

class Scratch {
 public:
  // this thread's, with all that earlier tasks took free again
  static Scratch& of_this_thread();
  // frees this thread's memory if it is more than a thread should keep
  static void trim();

  // always inline: a copy outside would be one for all instruction sets, and the linker would choose whose
  template <class S>
  __attribute__((always_inline)) S* take(int64_t count) {  // aligned to 64 bytes, uninitialised
    return static_cast<S*>(bytes(size_t(count) * sizeof(S)));
  }

  struct Block;
  struct Mark {
    Block* block;
    size_t used;
  };
  Mark mark() const;
  void back_to(Mark mark);  // frees what was taken since

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
