// The arguments of torch's operators. Each is named once here: the schema, the struct and the reading of torch's
// stack are made from these lists, which a test compares with those of Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace relpos {

using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// FIELD(type, name) for each argument of relpos::cpu, in order
#define RELPOS_ARGUMENTS(FIELD) \
  FIELD(Tensor, query)          \
  FIELD(Tensor, key)            \
  FIELD(Tensor, value)          \
  FIELD(Optional, rel_k)        \
  FIELD(Optional, rel_v)        \
  FIELD(Optional, relations)    \
  FIELD(Optional, mask)         \
  FIELD(Optional, starts)       \
  FIELD(int64_t, start)         \
  FIELD(Optional, key_lengths)  \
  FIELD(int64_t, left)          \
  FIELD(int64_t, right)         \
  FIELD(bool, is_causal)        \
  FIELD(Optional, seed)         \
  FIELD(double, dropout_p)      \
  FIELD(double, scale)

// relpos::cpu_backward takes those and then these. Bit i of `needs` asks for the gradient of the i-th of query, key,
// value, rel_k and rel_v.
#define RELPOS_BACKWARD_ARGUMENTS(FIELD) \
  FIELD(Tensor, out)                     \
  FIELD(Tensor, lse)                     \
  FIELD(Tensor, grad_out)                \
  FIELD(Optional, grad_lse)              \
  FIELD(int64_t, needs)

// a member that takes the next value from the stack and owns it
#define RELPOS_READ(Type, name) Type name = torch::stable::detail::to<Type>(*stack++);

struct Arguments {
  StableIValue* stack;  // the next value that nobody has read
  RELPOS_ARGUMENTS(RELPOS_READ)
};

struct BackwardArguments {
  StableIValue* stack;
  RELPOS_BACKWARD_ARGUMENTS(RELPOS_READ)
};

template <class T>
constexpr const char* SCHEMA_TYPE = nullptr;
template <>
constexpr const char* SCHEMA_TYPE<Tensor> = "Tensor ";
template <>
constexpr const char* SCHEMA_TYPE<Optional> = "Tensor? ";
template <>
constexpr const char* SCHEMA_TYPE<int64_t> = "SymInt ";
template <>
constexpr const char* SCHEMA_TYPE<bool> = "bool ";
template <>
constexpr const char* SCHEMA_TYPE<double> = "float ";

#define RELPOS_SCHEMA(Type, name) +", " + SCHEMA_TYPE<Type> + #name

// "Tensor query, Tensor key, ..."
inline std::string schema_of_arguments() { return (std::string() RELPOS_ARGUMENTS(RELPOS_SCHEMA)).substr(2); }
inline std::string schema_of_backward_arguments() {
  return schema_of_arguments() RELPOS_BACKWARD_ARGUMENTS(RELPOS_SCHEMA);
}

}  // namespace relpos
