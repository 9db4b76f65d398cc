// What autograd's hooks hold in Python.
#pragma once

#include <torch/csrc/autograd/python_hook.h>

#include <string_view>
#include <typeinfo>

namespace tensorplay::python {

// What the hooks of autograd hold in Python; their classes' type_info is hidden in libtorch_python.
struct PackedByPython {  // torch/csrc/autograd/python_saved_variable_hooks.h, PySavedVariableHooks
  void* vtable;
  PyObject* held[3];
};

template <class Use>
void each_held_by_hook(const std::type_info& type, const void* hook, Use use) {
  const std::string_view name = type.name();
  if (name == "N5torch8autograd23PyFunctionTensorPreHookE") {
    use(static_cast<const torch::autograd::PyFunctionTensorPreHook*>(hook)->dict);
  } else if (name == "N5torch8autograd17PyFunctionPreHookE") {
    use(static_cast<const torch::autograd::PyFunctionPreHook*>(hook)->dict);
  } else if (name == "N5torch8autograd18PyFunctionPostHookE") {
    use(static_cast<const torch::autograd::PyFunctionPostHook*>(hook)->dict);
  } else if (name == "N5torch8autograd32PyFunctionTensorPostAccGradHooksE") {
    use(static_cast<const torch::autograd::PyFunctionTensorPostAccGradHooks*>(hook)->dict);
  } else if (name == "N5torch8autograd20PySavedVariableHooksE") {
    for (PyObject* held : static_cast<const PackedByPython*>(hook)->held) use(held);
  }
}

}  // namespace tensorplay::python
