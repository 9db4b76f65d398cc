#include <torch/csrc/autograd/python_function.h>
// python_function.h brings Python.h as PyTorch wants it.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "../core/checksum.h"
#include "../core/graph.h"
#include "../core/graph_check.h"
#include "../core/read.h"
#include "call.h"
#include "graph.h"
#include "hook_objects.h"
#include "record.h"
#include "unpack.h"
#include "values.h"

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"

namespace tensorplay::python {

PyObject* node_name(const torch::autograd::Node& node) {
  try {
    return text(node.name());
  } catch (const std::exception&) {  // a Python function whose class raises when asked
    PyErr_Clear();
    return type_name(&typeid(node));
  }
}

namespace {

using torch::autograd::Node;

const char* state_name(SlotState state) {
  switch (state) {
    case SlotState::kHeld:
      return "held";
    case SlotState::kPackedByHook:
      return "packed_by_hook";
    case SlotState::kNothing:
      return "nothing";
    case SlotState::kReleased:
      return "released";
  }
  return "nothing";
}

PyObject* record_of(const at::TensorBase& tensor) {
  return make_record(tensor, python_object(tensor), 0);
}

// Makes (node, address, argument, index, state, expected_version, record, root) of each slot that is wanted.
class SavedList : public GraphVisitor {
 public:
  // Of all slots those that hold a tensor with this version counter, or in one of these storages; all, where
  // neither is given.
  SavedList(PyObject* list, const void* counter, const std::unordered_set<const void*>* storages)
      : list_(list), counter_(counter), storages_(storages) {}

  bool failed() const { return failed_; }
  size_t nodes() const { return nodes_; }
  size_t busy() const { return busy_; }

  void visit(const Node& node, size_t root, std::span<const SavedSlot> slots, bool busy) override {
    ++nodes_;
    busy_ += busy ? 1 : 0;
    for (const SavedSlot& slot : slots) {
      if (!failed_ && is_wanted(*slot.variable)) add(node_name(node), &node, slot, root);
    }
  }

  // What no node holds.
  void visit(const SavedSlot& slot, const char* holder, size_t root) {
    if (!failed_ && is_wanted(*slot.variable)) add(text(holder), slot.variable, slot, root);
  }

 private:
  bool is_wanted(const torch::autograd::SavedVariable& variable) const {
    const SavedFacts saved = read_saved(variable);
    if (counter_ == nullptr && storages_ == nullptr) return saved.state != SlotState::kNothing;
    if (saved.state != SlotState::kHeld) return false;
    const c10::TensorImpl& impl = *saved.tensor->unsafeGetTensorImpl();
    if (counter_ != nullptr) return version_counter_of(impl) == counter_;
    return storages_->contains(impl.unsafe_storage().unsafeGetStorageImpl());
  }

  // Takes the reference to the holder's name.
  void add(PyObject* name, const void* holder, const SavedSlot& slot, size_t root) {
    const SavedFacts saved = read_saved(*slot.variable);
    PyObject* record = saved.state == SlotState::kHeld ? record_of(*saved.tensor) : none();
    PyObject* version =
        saved.state == SlotState::kReleased ? none() : integer(static_cast<int64_t>(saved.expected_version));
    // A null among them gives null.
    PyObject* entry = Py_BuildValue("(NNNNsNNn)", name, address(holder), text(slot.argument),
                                    slot.index < 0 ? none() : integer(slot.index), state_name(saved.state),
                                    version, record, static_cast<Py_ssize_t>(root));
    failed_ = entry == nullptr || PyList_Append(list_, entry) != 0;
    Py_XDECREF(entry);
  }

  PyObject* list_;
  const void* counter_;
  const std::unordered_set<const void*>* storages_;
  size_t nodes_ = 0;
  size_t busy_ = 0;
  bool failed_ = false;
};

// False with an exception set.
bool read_addresses(PyObject* sequence, std::unordered_set<const void*>& out) {
  PyObject* fast = PySequence_Fast(sequence, "saved_tensors() takes a sequence of addresses");
  if (fast == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(PySequence_Fast_GET_ITEM(fast, i));
    if (PyErr_Occurred() != nullptr) break;
    out.insert(reinterpret_cast<const void*>(value));
  }
  Py_DECREF(fast);
  return PyErr_Occurred() == nullptr;
}

// A SavedTensor is neither node nor tensor: it is taken where there is a list for it.
bool read_roots(PyObject* sequence, std::vector<GraphRoot>& out, SavedList* saved = nullptr) {
  PyObject* fast = PySequence_Fast(sequence, "expected a sequence of tensors and nodes");
  if (fast == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i) {
    PyObject* root = PySequence_Fast_GET_ITEM(fast, i);
    const torch::autograd::SavedVariable* variable = saved == nullptr ? nullptr : unpack_saved(root);
    if (const at::Tensor* tensor = unpack_tensor(root)) {
      out.push_back({nullptr, tensor->unsafeGetTensorImpl()});
    } else if (is_node_class(Py_TYPE(root))) {
      out.push_back({unpack_node(root), nullptr});
    } else if (variable != nullptr) {
      saved->visit({"saved_args", -1, variable}, "torch.utils.checkpoint", out.size());
      out.push_back({});
    } else {
      PyErr_Format(PyExc_TypeError, "expected a torch.Tensor or a node of autograd, got %.200s",
                   Py_TYPE(root)->tp_name);
      break;
    }
  }
  Py_DECREF(fast);
  return PyErr_Occurred() == nullptr;
}

PyObject* saved_tensors(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 1, 4,
                      "saved_tensors(roots, sharing_counter_with=None, storages=None, gradients=True)")) {
    return nullptr;
  }
  const bool gradients = count < 4 || args[3] == Py_True;
  return guarded([&]() -> PyObject* {
    const void* counter = nullptr;
    if (count > 1 && args[1] != Py_None) {
      const at::Tensor* tensor = need_tensor(args[1]);
      if (tensor == nullptr) return nullptr;
      counter = version_counter_of(*tensor->unsafeGetTensorImpl());
      // An inference tensor has no counter, and nothing can have saved it.
      if (counter == nullptr) return Py_BuildValue("([]nn)", Py_ssize_t{0}, Py_ssize_t{0});
    }
    std::unordered_set<const void*> storages;
    const bool by_storage = count > 2 && args[2] != Py_None;
    if (by_storage && !read_addresses(args[2], storages)) return nullptr;
    PyObject* list = PyList_New(0);
    if (list == nullptr) return nullptr;
    SavedList saved(list, counter, by_storage ? &storages : nullptr);
    std::vector<GraphRoot> roots;
    const bool valid = read_roots(args[0], roots, &saved);
    if (valid) {
      walk_graph(roots, saved_by_python, saved, gradients ? Gradients::kOfLeaves : Gradients::kOfRoots);
    }
    if (!valid || saved.failed()) {
      Py_DECREF(list);
      return nullptr;
    }
    return Py_BuildValue("(Nnn)", list, static_cast<Py_ssize_t>(saved.nodes()),
                         static_cast<Py_ssize_t>(saved.busy()));
  });
}

std::string plain_name(const Node& node) {
  try {
    return node.name();
  } catch (const std::exception&) {  // a Python function whose class raises when asked
    PyErr_Clear();
    return c10::demangle(typeid(node).name());
  }
}

// (nodes, slots, storages, nbytes, packed)
PyObject* sum_of(const SavedSum& sum) {
  const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  return Py_BuildValue("KKKKK", number(sum.nodes), number(sum.slots), number(sum.storages),
                       number(sum.nbytes), number(sum.packed));
}

// Of the first ones, where there are more than `most`; null with an exception set.
template <class Item, class Make>
PyObject* list_of(const std::vector<Item>& all, Make make, size_t most = SIZE_MAX) {
  PyObject* list = PyList_New(0);
  for (size_t i = 0; list != nullptr && i < std::min(all.size(), most); ++i) {
    PyObject* entry = make(all[i]);
    if (entry == nullptr || PyList_Append(list, entry) != 0) Py_CLEAR(list);
    Py_XDECREF(entry);
  }
  return list;
}

PyObject* origin_of(const std::optional<Origin>& origin) {
  if (!origin) return none();
  return Py_BuildValue("(NI)", origin->is_rebuilt ? text("AsStridedBackward0") : node_name(*origin->node),
                       origin->output);
}

// (node, address, argument, index, expected_version, record, root, origin) of the first ones.
PyObject* slots_of(const std::vector<SavedAt>& all) {
  constexpr size_t kMost = 1000;
  const auto make = [](const SavedAt& at) {
    return Py_BuildValue("(NNNNINnN)", node_name(*at.node), address(at.node), text(at.argument),
                         at.index < 0 ? none() : integer(at.index), at.expected_version,
                         at.tensor == nullptr ? none() : record_of(*at.tensor),
                         static_cast<Py_ssize_t>(at.root), origin_of(at.origin));
  };
  return list_of(all, make, kMost);
}

// (roots, terms, released, whether weights moved, whether it spans steps)
PyObject* accumulation(const Accumulation& one) {
  return Py_BuildValue(
      "(NKKNN)", list_of(one.roots, [](size_t root) { return integer(static_cast<int64_t>(root)); }),
      static_cast<unsigned long long>(one.terms), static_cast<unsigned long long>(one.released),
      boolean(one.weights_moved), boolean(one.spans_steps()));
}

// Makes (node, thread, sequence number, argument, index, version, sum, record) of each tensor that is held.
class ChecksumList : public GraphVisitor {
 public:
  explicit ChecksumList(PyObject* list) : list_(list) {}
  bool failed() const { return failed_; }

  void visit(const Node& node, size_t, std::span<const SavedSlot> slots, bool) override {
    for (const SavedSlot& slot : slots) {
      const SavedFacts saved = read_saved(*slot.variable);
      if (failed_ || saved.state != SlotState::kHeld) continue;
      // A batch norm in training writes these without a version, and its backward does not read them.
      if (slot.argument.starts_with("running_") && is_training(node)) continue;
      add(node, slot, *saved.tensor);
    }
  }

 private:
  static bool is_training(const Node& node) {
    for (const auto& [name, value] : arguments_of(node)) {
      if (name == "training" || name == "train")
        return std::get_if<bool>(&value) != nullptr && std::get<bool>(value);
    }
    return false;
  }

  void add(const Node& node, const SavedSlot& slot, const at::TensorBase& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = sums_.try_emplace(impl);
    if (is_new) known->second = checksum_of(*impl);
    if (!known->second) return;
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    PyObject* version =
        version_counter_of(*impl) == nullptr ? none() : integer(impl->version_counter().current_version());
    PyObject* entry =
        Py_BuildValue("(NKKNNNKN)", node_name(node), number(node.thread_id()), number(node.sequence_nr()),
                      text(slot.argument), slot.index < 0 ? none() : integer(slot.index), version,
                      number(*known->second), record_of(tensor));
    failed_ = entry == nullptr || PyList_Append(list_, entry) != 0;
    Py_XDECREF(entry);
  }

  PyObject* list_;
  bool failed_ = false;
  std::unordered_map<const c10::TensorImpl*, std::optional<uint64_t>> sums_;
};

// Gathers what the hooks of packed tensors hold: their functions, and what they packed.
class PackedList : public GraphVisitor {
 public:
  explicit PackedList(PyObject* list) : list_(list) {}
  bool failed() const { return failed_; }

  void visit(const Node&, size_t, std::span<const SavedSlot> slots, bool) override {
    for (const SavedSlot& slot : slots) {
      const auto& hooks = compat::saved_hooks(*slot.variable);
      if (hooks == nullptr) continue;
      each_held_by_hook(typeid(*hooks), dynamic_cast<const void*>(hooks.get()), [this](PyObject* held) {
        if (held == nullptr || failed_ || !known_.insert(held).second) return;
        failed_ = PyList_Append(list_, held) != 0;
      });
    }
  }

 private:
  PyObject* list_;
  bool failed_ = false;
  std::unordered_set<const void*> known_;
};

// What a visitor puts into its list on the way through the graphs.
template <class Visitor>
PyObject* listed(PyObject* roots_given) {
  return guarded([&]() -> PyObject* {
    std::vector<GraphRoot> roots;
    if (!read_roots(roots_given, roots)) return nullptr;
    PyObject* list = PyList_New(0);
    if (list == nullptr) return nullptr;
    Visitor visitor(list);
    walk_graph(roots, saved_by_python, visitor, Gradients::kOfRoots);
    if (visitor.failed()) Py_CLEAR(list);
    return list;
  });
}

PyObject* packed_objects(PyObject*, PyObject* roots) {
  return listed<PackedList>(roots);
}

PyObject* saved_checksums(PyObject*, PyObject* roots) {
  return listed<ChecksumList>(roots);
}

PyObject* check_graph(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 1, 2, "check_graph(roots, parameters=())")) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<GraphRoot> roots;
    std::unordered_set<const void*> parameters;
    if (!read_roots(args[0], roots)) return nullptr;
    if (count > 1 && !read_addresses(args[1], parameters)) return nullptr;
    GraphCheck check(plain_name, gave_back_by_python);
    for (const void* storage : parameters) check.expect(static_cast<const c10::StorageImpl*>(storage));
    walk_graph(roots, saved_by_python, check, Gradients::kOfRoots);
    check.finish(roots, saved_by_python);
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    return Py_BuildValue(
        "(NKKKKKKNNNNNNN)", sum_of(check.total), number(check.busy), number(check.leaf_storages),
        number(check.leaf_nbytes), number(check.written.size()), number(check.released.size()),
        number(check.memoryless.size()), slots_of(check.written), slots_of(check.released),
        slots_of(check.memoryless),
        list_of(check.by_kind,
                [](const auto& one) { return Py_BuildValue("(NN)", text(one.first), sum_of(one.second)); }),
        list_of(
            check.by_leaf,
            [](const auto& one) { return Py_BuildValue("(NN)", address(one.first), sum_of(one.second)); }),
        list_of(check.accumulations, accumulation),
        list_of(check.cycles, [](const c10::TensorImpl* leaf) { return address(leaf); }));
  });
}

PyObject* argument(const ArgumentValue& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return boolean(*flag);
  if (const int64_t* number = std::get_if<int64_t>(&value)) return integer(*number);
  if (const auto* numbers = std::get_if<std::vector<int64_t>>(&value)) return integers(*numbers);
  return none();
}

PyObject* arguments(const Node& node) {
  PyObject* dict = PyDict_New();
  if (dict == nullptr) return nullptr;
  for (const auto& [name, value] : arguments_of(node)) {
    PyObject* key = text(name);
    PyObject* item = argument(value);
    const bool failed = key == nullptr || item == nullptr || PyDict_SetItem(dict, key, item) != 0;
    Py_XDECREF(key);
    Py_XDECREF(item);
    if (failed) {
      Py_DECREF(dict);
      return nullptr;
    }
  }
  return dict;
}

PyObject* view_nodes(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    PyObject* list = tensor == nullptr ? nullptr : PyList_New(0);
    if (list == nullptr) return nullptr;
    for (const ViewNode& step : tensorplay::view_nodes(*tensor->unsafeGetTensorImpl())) {
      PyObject* entry = Py_BuildValue("(NINN)", node_name(*step.node), step.output, arguments(*step.node),
                                      step.symbolic ? none() : integers(step.shape));
      const bool failed = entry == nullptr || PyList_Append(list, entry) != 0;
      Py_XDECREF(entry);
      if (failed) {
        Py_DECREF(list);
        return nullptr;
      }
    }
    return list;
  });
}

PyObject* view_of(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    const auto view = tensorplay::view_of(*tensor->unsafeGetTensorImpl());
    if (!view) return none();
    PyObject* base = python_object(*view->base);
    return Py_BuildValue("(NNN)", record_of(*view->base), Py_NewRef(base == nullptr ? Py_None : base),
                         type_name(view->function));
  });
}

PyMethodDef methods[] = {
    {"saved_tensors", fast_call(saved_tensors), METH_FASTCALL,
     "saved_tensors(roots, sharing_counter_with=None, storages=None, gradients=True, /)\n--\n\nAnswer what "
     "the graphs behind "
     "some tensors and nodes saved for backward: a list of (node, address, argument, index, state, "
     "expected_version, record, root), "
     "the number of nodes, and of those another thread held. Without `gradients` the graphs behind leaves' "
     "gradients, through which no backward goes, are left out."},
    {"check_graph", fast_call(check_graph), METH_FASTCALL,
     "check_graph(roots, parameters=(), /)\n--\n\nLook at the graphs behind some tensors and nodes: the sum "
     "of what they "
     "saved "
     "(nodes, slots, storages, nbytes, packed by hooks) beside what leaves have, or storages at the "
     "addresses `parameters`; busy nodes; storages and "
     "bytes of "
     "leaves that were saved; how many slots were written since, given back, left without memory, and the "
     "first of "
     "each as (node, address, argument, index, expected_version, record, root); the sums by kind of node, "
     "and by the "
     "address of the leaf that a node works with; scalars that others were added up in, as (root, terms, "
     "those that a "
     "backward ran through, whether leaves were saved at several versions); leaves whose gradient's graph "
     "leads back "
     "to them."},
    {"packed_objects", packed_objects, METH_O,
     "packed_objects(roots, /)\n--\n\nAnswer what the hooks of packed tensors in the graphs behind some "
     "tensors and nodes "
     "hold: their functions, and what they packed."},
    {"saved_checksums", saved_checksums, METH_O,
     "saved_checksums(roots, /)\n--\n\nSum up the bytes of what the graphs behind some tensors and nodes "
     "saved, as far "
     "as this process can read them: (node, its thread and sequence number, argument, index, version, sum, "
     "record)."},
    {"view_nodes", view_nodes, METH_O,
     "view_nodes(tensor, /)\n--\n\nAnswer (node, output, arguments, shape) of each node from a view's base "
     "to "
     "the view, or nothing."},
    {"view_of", view_of, METH_O,
     "view_of(tensor, /)\n--\n\nAnswer a view's base as record and object, if it has one, and the class of "
     "the view function PyTorch kept; None for what backward takes for no view."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_graph_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
