#include "bytes.h"

#include <optional>

#include "../core/bytes.h"
#include "../core/read.h"
#include "../device/own_memory.h"
#include "call.h"
#include "values.h"

namespace tensorplay::python {
namespace {

bool read_facts(PyObject* object, TensorFacts& facts) {
  const at::Tensor* tensor = need_tensor(object);
  if (tensor == nullptr) return false;
  read_tensor(*tensor->unsafeGetTensorImpl(), facts);
  return true;
}

// Giving up the GIL can cost milliseconds, so it is kept for what takes some microseconds; a disk may take
// longer.
bool takes_long(const TensorFacts& facts) {
  constexpr int64_t kShort = int64_t{1} << 16;
  return facts.data.origin != DataOrigin::kCpuAllocator || facts.storage.nbytes > kShort;
}

// Answers read(fetch), with OSError set where the bytes are not there.
template <class Read>
auto without_gil(bool release, Read read) -> std::optional<decltype(read(Fetch()))> {
  OwnMemory memory;
  const Fetch fetch = [&memory](const std::byte* from, std::byte* to, size_t count) {
    memory.read(from, to, count);
  };
  try {
    std::optional<WithoutGil> released;
    if (release) released.emplace();
    return read(fetch);
  } catch (const UnreadableMemory& error) {
    PyObject* value = Py_BuildValue("(is)", error.error(), error.what());
    if (value != nullptr) PyErr_SetObject(PyExc_OSError, value);
    Py_XDECREF(value);
    return std::nullopt;
  }
}

PyObject* count_nonfinite(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    TensorFacts facts;
    if (!read_facts(object, facts)) return nullptr;
    const auto answer = without_gil(
        takes_long(facts), [&](const Fetch& fetch) { return tensorplay::count_nonfinite(facts, fetch); });
    if (!answer) return nullptr;
    if (!*answer) return none();
    const Nonfinite& sum = **answer;
    return Py_BuildValue("(NNN)", integer(sum.nans), integer(sum.infinities), integer(sum.elements));
  });
}

PyObject* same_values(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "same_values(a, b)")) return nullptr;
  return guarded([&]() -> PyObject* {
    TensorFacts a;
    TensorFacts b;
    if (!read_facts(args[0], a) || !read_facts(args[1], b)) return nullptr;
    const auto answer = without_gil(takes_long(a) || takes_long(b),
                                    [&](const Fetch& fetch) { return tensorplay::same_values(a, b, fetch); });
    if (!answer) return nullptr;
    return *answer ? boolean(**answer) : none();
  });
}

PyObject* copy_bytes(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "copy_bytes(source, target)")) return nullptr;
  return guarded([&]() -> PyObject* {
    TensorFacts source;
    TensorFacts target;
    if (!read_facts(args[0], source) || !read_facts(args[1], target)) return nullptr;
    const auto answer = without_gil(takes_long(source), [&](const Fetch& fetch) {
      return tensorplay::copy_bytes(source, target, fetch);
    });
    return answer ? boolean(*answer) : nullptr;
  });
}

PyMethodDef methods[] = {
    {"count_nonfinite", count_nonfinite, METH_O,
     "count_nonfinite(tensor, /)\n--\n\nCount the elements of a dense CPU tensor that are NaN, those that "
     "are "
     "infinite, and all, one for each index; None where this process cannot read them. A complex element is "
     "what one of its parts is. OSError where a file mapped behind it was cut."},
    {"same_values", fast_call(same_values), METH_FASTCALL,
     "same_values(a, b, /)\n--\n\nAnswer whether each element has the same bytes in two dense CPU tensors; "
     "None where dtype, shape or a pending conjugation or negation differ, or this process cannot read them. "
     "OSError where a file mapped behind one was cut, unless a difference lies well before that."},
    {"copy_bytes", fast_call(copy_bytes), METH_FASTCALL,
     "copy_bytes(source, target, /)\n--\n\nCopy the bytes from the first to the last one that a dense CPU "
     "tensor reaches into a contiguous uint8 tensor of that many, of PyTorch's own CPU memory; False where "
     "one "
     "of them is none such. OSError where a file mapped behind the source was cut; some are copied then. The "
     "target's version stays as it is."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_bytes_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
