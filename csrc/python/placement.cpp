#include "placement.h"

#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../compat.h"
#include "../core/graph.h"
#include "../core/names.h"
#include "../core/pointer_set.h"
#include "../core/read.h"
#include "../device/owner.h"
#include "call.h"
#include "interpreter.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

// How a module, an optimizer or a tensor has a tensor.
enum class Role : uint8_t {
  kParameter,
  kBuffer,
  kAttribute,  // in the module, and not registered: .to() passes it over
  kHook,       // a hook's closure, arguments or object has it
  kGradient,
  kLocal,         // the tensor that a wrapper over a dense body computes with
  kBase,          // of a view
  kState,         // of an optimizer
  kOwnAttribute,  // of the tensor's own
  kTensor,        // it is what was handed in
};
constexpr std::array kRoles{"parameter", "buffer", "attribute", "hook",          "gradient",
                            "local",     "base",   "state",     "own attribute", "tensor"};

// What one step of a path is.
enum class StepKind : uint8_t { kRoot, kModule, kAttribute, kItem, kKey, kVariable, kRole };
constexpr std::array kSteps{"root", "module", "attribute", "item", "key", "variable", "role"};

// A tree: a path is read from its end.
struct Step {
  uint32_t parent = 0;
  StepKind kind = StepKind::kRoot;
  PyObject* key = nullptr;  // borrowed; the function, for a variable of a closure
  Py_ssize_t index = 0;     // of a root, an item, a variable
};

constexpr uint32_t kNoModule = UINT32_MAX;
constexpr size_t kMostOpened = 1'000'000;
constexpr int kDeepest = 20;
constexpr int kMostLevels = 3;  // of objects in objects

struct Module {
  PyTypeObject* type = nullptr;
  PyObject* dict = nullptr;  // borrowed from the module, which has it
  uint32_t step = 0;
  uint32_t parent = kNoModule;
  bool is_registered = true;  // in its parents' _modules, up to a root
  bool has_offload_hook = false;
  uint64_t own_devices = 0;  // bits: of registered tensors that are more than a number
  uint64_t devices = 0;      // of all registered tensors in it, and below
};

struct Entry {
  const c10::TensorImpl* impl = nullptr;
  PyObject* object = nullptr;  // borrowed; null for a gradient or a base without a Python object
  uint32_t step = 0;
  uint32_t module = kNoModule;
  Role role = Role::kParameter;
  uint8_t beside = 0;       // number of the device that it should be on, where that is one: of the parameter
  PyObject* key = nullptr;  // of an optimizer's state, borrowed
};

// Whatever a rule may want to tell apart. Compared byte for byte.
struct Situation {
  Role role = Role::kParameter;
  uint8_t device = 0;
  uint8_t label = 0;
  uint8_t backend = 0;
  uint8_t allocator = 0;
  uint8_t owner = 0;  // the device that the driver answered
  Kind kind = Kind::kUndefined;
  Driver driver = Driver::kUnknown;
  bool was_asked = false;
  bool is_number = false;  // on the CPU, without a dimension or an element: it computes with any device
  bool is_computed = false;
  bool has_offload_hook = false;
  bool is_registered = true;
  bool answers_device = false;  // its class has a `device` of its own, in Python
  std::array<uint8_t, 2> unused{};
  PyObject* key = nullptr;  // of an optimizer's state
  uint64_t around = 0;      // bits: the devices that it is to be compared with
  uint64_t model = 0;       // bits: the devices of everything registered

  bool operator==(const Situation& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};

struct Group {
  Situation situation;
  std::vector<uint32_t> entries;
  uint64_t nbytes = 0;  // of storages that no group before it has
};

// Devices by small numbers; 0 is none.
class Devices {
 public:
  uint8_t number(std::optional<c10::Device> device) {
    if (!device) return 0;
    for (size_t i = 0; i < known_.size(); ++i) {
      if (known_[i] == *device) return static_cast<uint8_t>(i + 1);
    }
    if (known_.size() == kMost) return 0;
    known_.push_back(*device);
    return static_cast<uint8_t>(known_.size());
  }
  std::string name(uint8_t number) const { return tensorplay::device_name(known_[number - 1]); }
  static uint64_t bit(uint8_t number) { return number == 0 ? 0 : uint64_t{1} << (number - 1); }
  static constexpr size_t kMost = 64;

 private:
  std::vector<c10::Device> known_;
};

// Modules' own bookkeeping: what is in these is no attribute, but for hooks.
struct Names {
  PyObject* parameters;
  PyObject* buffers;
  PyObject* modules;
  PyObject* local;
  PyObject* device;
  PyObject* state;
  PyObject* groups;
  PyObject* parameters_of_group;
  std::array<PyObject*, 2> offload;
};

const Names& names() {
  static const Names known{
      PyUnicode_InternFromString("_parameters"),
      PyUnicode_InternFromString("_buffers"),
      PyUnicode_InternFromString("_modules"),
      PyUnicode_InternFromString("_local_tensor"),
      PyUnicode_InternFromString("device"),
      PyUnicode_InternFromString("state"),
      PyUnicode_InternFromString("param_groups"),
      PyUnicode_InternFromString("params"),
      {PyUnicode_InternFromString("_hf_hook"), PyUnicode_InternFromString("_diffusers_hook")}};
  return known;
}

bool is_hook_name(PyObject* key) {
  const char* text = PyUnicode_Check(key) != 0 ? PyUnicode_AsUTF8(key) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  const std::string_view name(text);
  return name.ends_with("_hooks") || name.ends_with("_hooks_with_kwargs");
}

// What runs when a state dict is made or loaded computes with nothing of the model's.
bool is_state_dict_name(PyObject* key) {
  return is_hook_name(key) &&
         std::string_view(PyUnicode_AsUTF8(key)).find("state_dict") != std::string_view::npos;
}

class Placement {
 public:
  // `passed_over`: a tuple of classes whose objects are not opened, or null.
  Placement(PyTypeObject* module_class, bool gradients, PyObject* passed_over)
      : module_class_(module_class), passed_over_(passed_over), gradients_(gradients) {}

  // A module or a tensor; anything else is passed over.
  void add_root(PyObject* object, Py_ssize_t root) {
    const uint32_t step = add_step(0, StepKind::kRoot, nullptr, root);
    if (is_module(object)) {
      enter(object, step, kNoModule, true);
    } else if (unpack_tensor(object) != nullptr) {
      tensors_.push_back({object, step});
    }
  }

  // After the modules: parameters are then known by their paths.
  void add_optimizer(PyObject* optimizer, Py_ssize_t root) {
    PyObject* dict = dict_of(optimizer);
    PyObject* state = dict == nullptr ? nullptr : item_of(dict, names().state);
    if (state == nullptr || PyDict_Check(state) == 0) return;
    const uint32_t top = add_step(0, StepKind::kRoot, nullptr, root);
    PyObject* groups = item_of(dict, names().groups);
    if (groups != nullptr && PyList_Check(groups) != 0) add_options(groups, top);
    const uint32_t at = add_step(top, StepKind::kAttribute, names().state);
    PyObject *owner, *values;
    Py_ssize_t position = 0;
    while (PyDict_Next(state, &position, &owner, &values) != 0) {
      const at::Tensor* parameter = unpack_tensor(owner);
      if (parameter == nullptr || !parameter->defined() || PyDict_Check(values) == 0) continue;
      const uint8_t beside = devices_.number(device_of(*parameter->unsafeGetTensorImpl()));
      const uint32_t here = add_step(at, StepKind::kKey, owner);
      PyObject *name, *value;
      Py_ssize_t inner = 0;
      while (PyDict_Next(values, &inner, &name, &value) != 0) {
        add_state(value, add_step(here, StepKind::kKey, name), name, beside, 0);
      }
    }
  }

  // A tensor of an optimizer, or those in a container there.
  void add_state(PyObject* value, uint32_t step, PyObject* name, uint8_t beside, int depth) {
    const at::Tensor* tensor = unpack_tensor(value);
    if (tensor != nullptr && tensor->defined()) {
      seen_.insert(value);
      entries_.push_back({tensor->unsafeGetTensorImpl(), value, step, kNoModule, Role::kState, beside, name});
    } else if (depth < kDeepest && (PyList_Check(value) != 0 || PyTuple_Check(value) != 0)) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(value, i);
        if (!is_plain(item))
          add_state(item, add_step(step, StepKind::kItem, nullptr, i), name, beside, depth + 1);
      }
    } else if (depth < kDeepest && PyDict_Check(value) != 0) {
      PyObject *key, *item;
      Py_ssize_t position = 0;
      while (PyDict_Next(value, &position, &key, &item) != 0) {
        if (!is_plain(item)) add_state(item, add_step(step, StepKind::kKey, key), name, beside, depth + 1);
      }
    }
  }

  // Numbers that a group of parameters shares, where they are tensors: a learning rate.
  void add_options(PyObject* groups, uint32_t top) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); ++i) {
      PyObject* group = PyList_GET_ITEM(groups, i);
      PyObject* parameters = PyDict_Check(group) != 0 ? item_of(group, names().parameters_of_group) : nullptr;
      if (parameters == nullptr || PyList_Check(parameters) == 0 || PyList_GET_SIZE(parameters) == 0)
        continue;
      const at::Tensor* first = unpack_tensor(PyList_GET_ITEM(parameters, 0));
      if (first == nullptr || !first->defined()) continue;
      const uint8_t beside = devices_.number(device_of(*first->unsafeGetTensorImpl()));
      const uint32_t here =
          add_step(add_step(top, StepKind::kAttribute, names().groups), StepKind::kItem, nullptr, i);
      PyObject *name, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(group, &position, &name, &value) != 0) {
        if (value == parameters || is_plain(value)) continue;
        add_state(value, add_step(here, StepKind::kKey, name), name, beside, 0);
      }
    }
  }

  void read() {
    // Unregistered tensors last: what is registered somewhere is no attribute.
    for (size_t number = 0; number < modules_.size(); ++number)
      open_attributes(static_cast<uint32_t>(number));
    for (size_t number = 0; number < hooked_.size(); ++number) {
      const auto [object, step, module] = hooked_[number];
      const auto* variable = reinterpret_cast<const THPVariable*>(object);
      for (PyObject* hooks : {variable->backward_hooks, variable->post_accumulate_grad_hooks}) {
        if (hooks == nullptr || PyDict_Check(hooks) == 0) continue;
        open(hooks, add_step(step, StepKind::kRole, nullptr, static_cast<Py_ssize_t>(Role::kHook)), module,
             Role::kHook, 0, true);
      }
    }
    for (const auto& [object, step] : tensors_) {  // what no module and no optimizer has
      const at::Tensor* tensor = unpack_tensor(object);
      if (tensor->defined() && seen_.insert(object)) {
        add_tensor(*tensor, object, step, kNoModule, Role::kTensor);
      }
    }
    for (size_t number = modules_.size(); number-- > 0;) {
      Module& module = modules_[number];
      if (module.parent != kNoModule) modules_[module.parent].devices |= module.devices;
    }
    accelerator_ = active_accelerator();
    for (size_t number = 0; number < entries_.size(); ++number) put(static_cast<uint32_t>(number));
  }

  size_t modules() const { return modules_.size(); }
  const std::vector<Group>& groups() const { return groups_; }

  PyObject* answer(const Group& group, size_t most) const;

 private:
  static std::optional<c10::Device> device_of(const c10::TensorImpl& impl) {
    return compat::own_device(impl);
  }

  uint32_t add_step(uint32_t parent, StepKind kind, PyObject* key, Py_ssize_t index = 0) {
    steps_.push_back({parent, kind, key, index});
    return static_cast<uint32_t>(steps_.size() - 1);
  }

  bool is_module(PyObject* object) const { return PyType_IsSubtype(Py_TYPE(object), module_class_) != 0; }

  // A module with all that is registered in it, iteratively.
  void enter(PyObject* top, uint32_t top_step, uint32_t top_parent, bool is_registered) {
    struct Open {
      PyObject* object;
      uint32_t step;
      uint32_t parent;
    };
    std::vector<Open> open{{top, top_step, top_parent}};
    while (!open.empty()) {
      const auto [object, step, parent] = open.back();
      open.pop_back();
      PyObject* dict = dict_of(object);
      if (dict == nullptr || !seen_.insert(object)) continue;
      const auto number = static_cast<uint32_t>(modules_.size());
      Module module{Py_TYPE(object), dict, step, parent, is_registered};
      module.has_offload_hook = parent != kNoModule && modules_[parent].has_offload_hook;
      for (PyObject* name : names().offload) {
        module.has_offload_hook = module.has_offload_hook || item_of(dict, name) != nullptr;
      }
      modules_.push_back(module);
      add_registered(number, names().parameters, Role::kParameter);
      add_registered(number, names().buffers, Role::kBuffer);
      PyObject* children = item_of(dict, names().modules);
      if (children == nullptr || PyDict_Check(children) == 0) continue;
      const size_t first = open.size();
      PyObject *name, *child;
      Py_ssize_t position = 0;
      while (PyDict_Next(children, &position, &name, &child) != 0) {
        if (is_module(child)) open.push_back({child, add_step(step, StepKind::kModule, name), number});
      }
      std::reverse(open.begin() + static_cast<ptrdiff_t>(first), open.end());
    }
  }

  void add_registered(uint32_t number, PyObject* name, Role role) {
    PyObject* members = item_of(modules_[number].dict, name);
    if (members == nullptr || PyDict_Check(members) == 0) return;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(members, &position, &key, &value) != 0) {
      const at::Tensor* tensor = unpack_tensor(value);
      if (tensor == nullptr || !tensor->defined()) continue;
      const c10::TensorImpl& impl = *tensor->unsafeGetTensorImpl();
      Module& module = modules_[number];
      const uint64_t bit = Devices::bit(devices_.number(device_of(impl)));
      module.devices |= bit;
      if (!is_number(impl)) module.own_devices |= bit;
      if (!seen_.insert(value)) continue;  // shared with another module
      const Role shown = module.is_registered ? role : Role::kAttribute;
      add_tensor(*tensor, value, add_step(module.step, StepKind::kAttribute, key), number, shown);
    }
  }

  // The tensor, and those that only it leads to.
  void add_tensor(const at::Tensor& tensor, PyObject* object, uint32_t step, uint32_t module, Role role) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    entries_.push_back({&impl, object, step, module, role, 0});
    const uint8_t device = devices_.number(device_of(impl));
    if (const at::TensorBase* gradient = gradients_ ? grad_of(impl) : nullptr;
        gradient != nullptr && gradient->defined()) {
      add_beside(*gradient, step, module, Role::kGradient, device);
    }
    if (impl.autograd_meta() != nullptr) {
      if (const std::optional<ViewFacts> view = view_of(impl); view && view->base->defined()) {
        add_beside(*view->base, step, module, Role::kBase, device);
      }
    }
    if (module != kNoModule) hooked_.push_back({object, step, module});
    // What a wrapper without memory consists of lies where it likes.
    PyObject* dict = impl.key_set().has(c10::DispatchKey::Python) ? nullptr : dict_if_any(object);
    if (dict == nullptr) return;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      const at::Tensor* inner = unpack_tensor(value);
      if (inner == nullptr || !inner->defined() || !seen_.insert(value)) continue;
      const bool is_local = PyUnicode_Check(key) != 0 && PyUnicode_Compare(key, names().local) == 0;
      entries_.push_back({inner->unsafeGetTensorImpl(), value, add_step(step, StepKind::kAttribute, key),
                          module, is_local ? Role::kLocal : Role::kOwnAttribute, device});
    }
  }

  void add_beside(const at::TensorBase& tensor, uint32_t step, uint32_t module, Role role, uint8_t device) {
    if (PyObject* object = python_object(tensor)) seen_.insert(object);
    entries_.push_back({tensor.unsafeGetTensorImpl(), python_object(tensor),
                        add_step(step, StepKind::kRole, nullptr, static_cast<Py_ssize_t>(role)), module, role,
                        device});
  }

  // A tensor's own dictionary where something is in it: asking for an empty one would make it.
  static PyObject* dict_if_any(PyObject* object) {
    bool refers = false;
    const auto visit = [](PyObject* referent, void* found) {
      *static_cast<bool*>(found) = *static_cast<bool*>(found) || PyType_Check(referent) == 0;
      return 0;
    };
    Py_TYPE(object)->tp_traverse(object, visit, &refers);
    return refers ? dict_of(object) : nullptr;
  }

  void open_attributes(uint32_t number) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    PyObject* dict = modules_[number].dict;
    while (PyDict_Next(dict, &position, &key, &value) != 0) {
      if (is_plain(value)) continue;
      if (key == names().parameters || key == names().buffers || key == names().modules) continue;
      if (key == names().offload[0] || key == names().offload[1] || is_state_dict_name(key)) continue;
      const bool is_hook = PyDict_Check(value) != 0 && PyDict_GET_SIZE(value) != 0 && is_hook_name(key);
      const uint32_t step = add_step(modules_[number].step, StepKind::kAttribute, key);
      open(value, step, number, is_hook ? Role::kHook : Role::kAttribute, 0, true);
    }
    open_class(number);
  }

  static bool is_plain(PyObject* value) {
    return value == Py_None || PyBool_Check(value) != 0 || PyLong_Check(value) != 0 ||
           PyFloat_Check(value) != 0 || PyUnicode_Check(value) != 0 ||
           (PyDict_Check(value) != 0 && PyDict_GET_SIZE(value) == 0);
  }

  void open(PyObject* value, uint32_t step, uint32_t module, Role role, int depth, bool may_open) {
    if (is_plain(value) || depth > kDeepest || seen_.size() > kMostOpened) return;
    if (const at::Tensor* tensor = unpack_tensor(value)) {
      if (tensor->defined() && seen_.insert(value)) add_tensor(*tensor, value, step, module, role);
      return;
    }
    if (is_module(value)) {
      // Not registered, or it would have been met. Of a hook or an object it is somebody else's, as a parent.
      if (role == Role::kAttribute && may_open && modules_[module].is_registered) {
        const size_t first = modules_.size();
        enter(value, step, module, false);
        for (size_t number = first; number < modules_.size(); ++number) modules_[number].devices = 0;
      }
      return;
    }
    if (PyType_Check(value) != 0 || PyModule_Check(value) != 0 || !seen_.insert(value)) return;
    if (PyDict_Check(value) != 0) {
      PyObject *key, *item;
      Py_ssize_t position = 0;
      while (PyDict_Next(value, &position, &key, &item) != 0) {
        open(item, add_step(step, StepKind::kKey, key), module, role, depth + 1, may_open);
      }
    } else if (PyList_Check(value) != 0 || PyTuple_Check(value) != 0) {
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        PyObject* item = PySequence_Fast_GET_ITEM(value, i);
        if (is_plain(item)) continue;
        open(item, add_step(step, StepKind::kItem, nullptr, i), module, role, depth + 1, may_open);
      }
    } else if (PyAnySet_CheckExact(value) != 0 || is_builtin(value, "collections.deque")) {
      open_iterable(value, step, module, role, depth, may_open);
    } else if (PyFunction_Check(value) != 0 || PyMethod_Check(value) != 0 ||
               is_builtin(value, "functools.partial")) {
      open_call(value, step, module, depth, may_open);
    } else if (may_open && !is_passed_over(value) && holds_more(value)) {
      open_object(value, step, module, role, depth);
    }
  }

  bool is_passed_over(PyObject* object) const {
    for (Py_ssize_t i = 0; passed_over_ != nullptr && i < PyTuple_GET_SIZE(passed_over_); ++i) {
      auto* kind = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(passed_over_, i));
      if (PyType_IsSubtype(Py_TYPE(object), kind) != 0) return true;
    }
    return false;
  }

  // Whether an object refers to anything that is worth its dictionary: to ask for one may make it.
  static bool holds_more(PyObject* object) {
    bool found = false;
    const auto visit = [](PyObject* referent, void* more) {
      const bool is_own_dict = PyDict_Check(referent) != 0 && PyDict_GET_SIZE(referent) != 0;
      *static_cast<bool*>(more) =
          *static_cast<bool*>(more) || is_own_dict || (PyType_Check(referent) == 0 && !is_plain(referent));
      return 0;
    };
    if (Py_TYPE(object)->tp_traverse == nullptr) return false;
    Py_TYPE(object)->tp_traverse(object, visit, &found);
    return found;
  }

  // Whether it is of this very class of C code, which runs nobody's Python.
  static bool is_builtin(PyObject* object, const char* name) {
    const PyTypeObject* type = Py_TYPE(object);
    return std::strcmp(type->tp_name, name) == 0;
  }

  void open_iterable(PyObject* iterable, uint32_t step, uint32_t module, Role role, int depth,
                     bool may_open) {
    const Owned iterator(PyObject_GetIter(iterable));
    Py_ssize_t index = 0;
    while (iterator != nullptr) {
      const Owned item(PyIter_Next(iterator.get()));  // what is iterated over holds it too
      if (item == nullptr) break;
      open(item.get(), add_step(step, StepKind::kItem, nullptr, index++), module, role, depth + 1, may_open);
    }
    PyErr_Clear();
  }

  void open_call(PyObject* call, uint32_t step, uint32_t module, int depth, bool may_open) {
    if (PyMethod_Check(call) != 0) {
      open(PyMethod_GET_SELF(call), step, module, Role::kHook, depth + 1, may_open);
      return;
    }
    if (PyFunction_Check(call) == 0) {
      for (const char* part : {"func", "args", "keywords"}) {
        const Owned inside(PyObject_GetAttrString(call, part));  // a partial holds it too
        if (inside != nullptr) open(inside.get(), step, module, Role::kHook, depth + 1, may_open);
      }
      PyErr_Clear();
      return;
    }
    PyObject* cells = PyFunction_GET_CLOSURE(call);
    for (Py_ssize_t i = 0; cells != nullptr && i < PyTuple_GET_SIZE(cells); ++i) {
      PyObject* inside = PyCell_GET(PyTuple_GET_ITEM(cells, i));
      if (inside == nullptr) continue;
      open(inside, add_step(step, StepKind::kVariable, call, i), module, Role::kHook, depth + 1, may_open);
    }
    PyObject* defaults = PyFunction_GET_DEFAULTS(call);
    if (defaults != nullptr) open(defaults, step, module, Role::kHook, depth + 1, may_open);
  }

  // Its attributes, in its dictionary and in slots.
  void open_object(PyObject* object, uint32_t step, uint32_t module, Role role, int depth) {
    if (PyObject* dict = dict_of(object)) {
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(dict, &position, &key, &value) != 0) {
        if (is_plain(value)) continue;
        open_part(value, add_step(step, StepKind::kAttribute, key), module, role, depth);
      }
    }
    PyObject* bases = Py_TYPE(object)->tp_mro;
    for (Py_ssize_t i = 0; bases != nullptr && i < PyTuple_GET_SIZE(bases); ++i) {
      auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
      if ((base->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || base->tp_dict == nullptr) continue;
      PyObject *key, *member;
      Py_ssize_t position = 0;
      while (PyDict_Next(base->tp_dict, &position, &key, &member) != 0) {
        if (Py_TYPE(member) != &PyMemberDescr_Type) continue;
        const PyMemberDef* slot = reinterpret_cast<PyMemberDescrObject*>(member)->d_member;
        if (reinterpret_cast<PyDescrObject*>(member)->d_type != base || slot->type != T_OBJECT_EX) continue;
        PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot->offset);
        if (value == nullptr || is_plain(value)) continue;
        open_part(value, add_step(step, StepKind::kAttribute, key), module, role, depth);
      }
    }
  }

  // An object's attribute: what a container there holds may be an object once more, as a cache's layers are.
  void open_part(PyObject* value, uint32_t step, uint32_t module, Role role, int depth) {
    const bool has_parts = PyList_Check(value) != 0 || PyTuple_Check(value) != 0 ||
                           PyDict_Check(value) != 0 || is_builtin(value, "collections.deque");
    ++levels_;
    open(value, step, module, role, depth + 1, has_parts && levels_ < kMostLevels);
    --levels_;
  }

  // Tensors that a class of modules has: all of its modules share them.
  void open_class(uint32_t number) {
    PyObject* bases = modules_[number].type->tp_mro;
    for (Py_ssize_t i = 0; bases != nullptr && i < PyTuple_GET_SIZE(bases); ++i) {
      auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(bases, i));
      if (base == module_class_ || base->tp_dict == nullptr || !seen_.insert(base)) continue;
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(base->tp_dict, &position, &key, &value) != 0) {
        const at::Tensor* tensor = unpack_tensor(value);
        if (tensor == nullptr || !tensor->defined() || !seen_.insert(value)) continue;
        add_tensor(*tensor, value, add_step(modules_[number].step, StepKind::kAttribute, key), number,
                   Role::kAttribute);
      }
    }
  }

  static bool is_number(const c10::TensorImpl& impl) {
    const std::optional<c10::Device> device = device_of(impl);
    return device && device->is_cpu() &&
           (compat::own_geometry(impl).size() == 0 || compat::own_numel(impl) == 0);
  }

  // Whether `.device` of a tensor is answered by a subclass, and not by what TensorImpl says.
  bool answers_device(PyObject* object) {
    PyTypeObject* type = object == nullptr ? nullptr : Py_TYPE(object);
    if (type == nullptr || type == last_type_) return type != nullptr && last_type_answers_;
    last_type_ = type;
    last_type_answers_ = false;
    for (Py_ssize_t i = 0; type->tp_mro != nullptr && i < PyTuple_GET_SIZE(type->tp_mro); ++i) {
      auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(type->tp_mro, i));
      if (base == reinterpret_cast<PyTypeObject*>(THPVariableClass)) break;
      if (base->tp_dict != nullptr && item_of(base->tp_dict, names().device) != nullptr) {
        last_type_answers_ = true;
        break;
      }
    }
    return last_type_answers_;
  }

  void put(uint32_t number);
  uint32_t root_of(uint32_t module) const {
    while (modules_[module].parent != kNoModule) module = modules_[module].parent;
    return module;
  }
  uint64_t devices_around(uint32_t module) const {
    for (uint32_t at = module; at != kNoModule; at = modules_[at].parent) {
      if (modules_[at].devices != 0) return modules_[at].devices;
    }
    return 0;
  }

  PyTypeObject* module_class_;
  PyObject* passed_over_;
  bool gradients_;
  std::vector<Step> steps_{Step()};
  struct Hooked {
    PyObject* tensor;
    uint32_t step;
    uint32_t module;
  };

  std::vector<Module> modules_;
  std::vector<Hooked> hooked_;  // registered and held tensors, which may have hooks of their own
  std::vector<std::pair<PyObject*, uint32_t>> tensors_;  // handed in, with their steps
  std::vector<Entry> entries_;
  std::vector<Group> groups_;
  Devices devices_;
  PointerSet seen_;
  PointerSet counted_;
  std::optional<c10::DeviceType> accelerator_;
  PyTypeObject* last_type_ = nullptr;
  bool last_type_answers_ = false;
  int levels_ = 0;
  size_t last_group_ = 0;
  const void* last_allocator_ = nullptr;
  uint8_t last_allocator_serves_ = 0;
};

void Placement::put(uint32_t number) {
  const Entry& entry = entries_[number];
  TensorFacts facts;
  read_tensor(*entry.impl, facts);
  Situation found;
  found.role = entry.role;
  found.device = devices_.number(facts.impl.device);
  found.kind = facts.kind;
  const auto of_type = [this](std::optional<c10::DeviceType> type) {
    return devices_.number(type ? std::optional(c10::Device(*type)) : std::nullopt);
  };
  found.backend = of_type(facts.impl.backend);
  if (facts.has_storage) {
    found.label = devices_.number(facts.data.device);
    if (facts.storage.allocator != last_allocator_) {
      last_allocator_ = facts.storage.allocator;
      last_allocator_serves_ = of_type(allocator_device_type(last_allocator_));
    }
    found.allocator = last_allocator_serves_;
    // A pointer that PyTorch's own CPU allocator freed is nobody else's; a driver that is asked for one that
    // is not its own throws, which is slow.
    const bool is_cpu = facts.data.device.is_cpu();
    const bool is_foreign = facts.data.origin == DataOrigin::kBorrowed ||
                            facts.data.origin == DataOrigin::kOther ||
                            facts.data.origin == DataOrigin::kCallback;
    const bool is_asked =
        is_cpu ? is_foreign && accelerator_.has_value() && !is_pinned(*accelerator_, facts.data.pointer)
               : !facts.data.device.is_meta();
    if (facts.data.pointer != nullptr && is_asked) {
      const DriverAnswer answer =
          ask_driver(is_cpu ? *accelerator_ : facts.data.device.type(), facts.data.pointer);
      found.was_asked = true;
      found.driver = answer.driver;
      found.owner = devices_.number(answer.device);
    }
  }
  found.is_number = is_number(*entry.impl);
  found.is_computed = facts.impl.grad_fn != nullptr;
  if (entry.module != kNoModule) {
    const Module& module = modules_[entry.module];
    found.has_offload_hook = module.has_offload_hook;
    found.is_registered = module.is_registered;
  }
  if (entry.role == Role::kParameter || entry.role == Role::kBuffer) {
    found.around = modules_[entry.module].own_devices;
  } else if (entry.role == Role::kAttribute || entry.role == Role::kHook) {
    found.around = devices_around(entry.module);
  } else {
    found.around = Devices::bit(entry.beside);  // none for what was handed in
  }
  found.model = entry.module == kNoModule ? 0 : modules_[root_of(entry.module)].devices;
  found.key = entry.key;
  found.answers_device = answers_device(entry.object);
  if (last_group_ >= groups_.size() || !(groups_[last_group_].situation == found)) {
    last_group_ = 0;
    while (last_group_ < groups_.size() && !(groups_[last_group_].situation == found)) ++last_group_;
    if (last_group_ == groups_.size()) groups_.push_back({found, {}, 0});
  }
  Group& group = groups_[last_group_];
  group.entries.push_back(number);
  if (facts.has_storage && !facts.storage.symbolic && counted_.insert(facts.storage.address)) {
    group.nbytes += static_cast<uint64_t>(std::max<int64_t>(facts.storage.nbytes, 0));
  }
}

const char* driver_name(Driver driver) {
  switch (driver) {
    case Driver::kUnknown:
      return "unknown";
    case Driver::kAnswered:
      return "answered";
    case Driver::kDenied:
      return "denied";
    case Driver::kAbsent:
      return "absent";
  }
  return "unknown";
}

PyObject* Placement::answer(const Group& group, size_t most) const {
  const auto device = [this](uint8_t number) { return number == 0 ? none() : text(devices_.name(number)); };
  const auto devices = [this](uint64_t bits) {
    PyObject* list = PyList_New(0);
    for (uint8_t number = 1; list != nullptr && number <= Devices::kMost; ++number) {
      if ((bits & Devices::bit(number)) == 0) continue;
      const Owned name(text(devices_.name(number)));
      if (name == nullptr || PyList_Append(list, name.get()) != 0) Py_CLEAR(list);
    }
    return list;
  };
  const auto path = [this](uint32_t step) -> PyObject* {
    PyObject* list = PyList_New(0);
    for (; list != nullptr; step = steps_[step].parent) {
      const Step& at = steps_[step];
      PyObject* key = at.kind == StepKind::kRole ? text(kRoles[static_cast<size_t>(at.index)])
                                                 : Py_NewRef(at.key == nullptr ? Py_None : at.key);
      const Owned entry(Py_BuildValue("(sNn)", kSteps[static_cast<size_t>(at.kind)], key, at.index));
      if (entry == nullptr || PyList_Append(list, entry.get()) != 0) Py_CLEAR(list);
      if (at.kind == StepKind::kRoot) break;
    }
    if (list != nullptr) PyList_Reverse(list);
    return list;
  };
  const Situation& at = group.situation;
  PyObject* members = PyList_New(0);
  for (size_t i = 0; members != nullptr && i < std::min(group.entries.size(), most); ++i) {
    const Entry& entry = entries_[group.entries[i]];
    PyObject* object = entry.object == nullptr || Py_REFCNT(entry.object) == 0 ? Py_None : entry.object;
    const Owned member(Py_BuildValue("(NNO)", path(entry.step),
                                     entry.module == kNoModule ? none() : path(modules_[entry.module].step),
                                     object));
    if (member == nullptr || PyList_Append(members, member.get()) != 0) Py_CLEAR(members);
  }
  return Py_BuildValue(
      "(sNNNNNsNNNNNNNONNnKN)", kRoles[static_cast<size_t>(at.role)], device(at.device), device(at.label),
      device(at.backend), device(at.allocator), device(at.owner), driver_name(at.driver),
      boolean(at.was_asked), text(kind_name(at.kind)), boolean(at.is_number), boolean(at.is_computed),
      boolean(at.has_offload_hook), boolean(at.is_registered), boolean(at.answers_device),
      at.key == nullptr ? Py_None : at.key, devices(at.around), devices(at.model),
      static_cast<Py_ssize_t>(group.entries.size()), static_cast<unsigned long long>(group.nbytes), members);
}

PyObject* placement(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 3, 7,
                      "placement(module_class, roots, optimizers, gradients=True, passed_over=(), most=0, "
                      "wanted=None)")) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    PyObject* passed_over = count > 4 && PyTuple_Check(args[4]) != 0 ? args[4] : nullptr;
    Placement found(reinterpret_cast<PyTypeObject*>(args[0]), count < 4 || args[3] == Py_True, passed_over);
    const Owned modules(PySequence_Fast(args[1], "expected a sequence of modules"));
    if (modules == nullptr) return nullptr;
    const Owned optimizers(PySequence_Fast(args[2], "expected a sequence of optimizers"));
    if (optimizers == nullptr) return nullptr;
    const Py_ssize_t most = count > 5 ? PyLong_AsSsize_t(args[5]) : 0;
    if (most == -1 && PyErr_Occurred() != nullptr) return nullptr;
    std::vector<int64_t> wanted;
    const bool by_number = count > 6 && args[6] != Py_None;
    if (by_number && !read_integers(args[6], wanted)) return nullptr;
    const Py_ssize_t number_of_modules = PySequence_Fast_GET_SIZE(modules.get());
    for (Py_ssize_t i = 0; i < number_of_modules; ++i) {
      found.add_root(PySequence_Fast_GET_ITEM(modules.get(), i), i);
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(optimizers.get()); ++i) {
      found.add_optimizer(PySequence_Fast_GET_ITEM(optimizers.get(), i), number_of_modules + i);
    }
    found.read();
    PyObject* list = PyList_New(0);
    for (size_t i = 0; list != nullptr && i < found.groups().size(); ++i) {
      const bool is_wanted = !by_number || std::ranges::find(wanted, static_cast<int64_t>(i)) != wanted.end();
      const Owned group(found.answer(found.groups()[i], is_wanted ? static_cast<size_t>(most) : 0));
      if (group == nullptr || PyList_Append(list, group.get()) != 0) Py_CLEAR(list);
    }
    return list == nullptr ? nullptr : Py_BuildValue("(nN)", static_cast<Py_ssize_t>(found.modules()), list);
  });
}

PyMethodDef methods[] = {
    {"placement", fast_call(placement), METH_FASTCALL,
     "placement(module_class, roots, optimizers, gradients=True, passed_over=(), most=0, wanted=None, "
     "/)\n--\n\nGroup some "
     "tensors, and "
     "every "
     "one that some modules and optimizers hold, by what its device facts say; answer how many modules there "
     "are, and "
     "the groups, with the paths of up to `most` members, of those whose numbers are in `wanted` where it is "
     "given."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_placement_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
