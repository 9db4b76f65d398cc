#include <ATen/dlpack.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
// They bring PyTorch's own Python.h.
#include <algorithm>
#include <bit>
#include <string>
#include <unordered_set>

#include "../core/owners.h"
#include "call.h"
#include "graph.h"
#include "heap_graph.h"
#include "hook_objects.h"
#include "type_cache.h"
#include "unpack.h"
#include "values.h"

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"

namespace tensorplay::python {
namespace {

using torch::autograd::Node;

enum class Class : uint8_t {
  kLeaf,
  kPlain,
  kAsk,
  kDict,
  kSequence,
  kTensor,
  kStorage,
  kNode,
  kArray,
  kCapsule,
  kSaved
};

PyTypeObject* array_class() {
  PyObject* modules = PyImport_GetModuleDict();
  PyObject* numpy = modules == nullptr ? nullptr : PyDict_GetItemString(modules, "numpy");
  PyObject* found = numpy == nullptr || !PyModule_Check(numpy)
                        ? nullptr
                        : PyDict_GetItemString(PyModule_GetDict(numpy), "ndarray");
  return found != nullptr && PyType_Check(found) ? reinterpret_cast<PyTypeObject*>(found) : nullptr;
}

}  // namespace

// How objects of a type are opened, remembered for the few types that most objects have.
class HeapGraph::Classes {
 public:
  explicit Classes(PyTypeObject* array) : array_(array) {}

  Class of(PyTypeObject* type) {
    return known_.of(type, [this](PyTypeObject* asked) { return classify(asked); });
  }

 private:
  Class classify(PyTypeObject* type) const {
    if (array_ != nullptr && PyType_IsSubtype(type, array_) != 0) return Class::kArray;
    if (is_saved_class(type)) return Class::kSaved;
    if (type == &PyCapsule_Type) return Class::kCapsule;
    if (PyType_HasFeature(type, Py_TPFLAGS_HAVE_GC) == 0 || type->tp_traverse == nullptr) return Class::kLeaf;
    if (type == &PyDict_Type) return Class::kDict;
    if (type == &PyList_Type || type == &PyTuple_Type) return Class::kSequence;
    if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0) return Class::kTensor;
    if (PyType_IsSubtype(type, &THPStorageType) != 0) return Class::kStorage;
    if (is_node_class(type)) return Class::kNode;
    // Type objects made in C belong to nobody, and say so.
    return type->tp_is_gc != nullptr ? Class::kAsk : Class::kPlain;
  }

  PyTypeObject* array_;
  TypeCache<Class> known_;
};

namespace {

// The beginning of NumPy's PyArrayObject_fields, which its binary interface fixes (numpy/ndarraytypes.h).
struct Array {
  PyObject ob_base;
  char* data;
  int dims;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};
constexpr int kArrayOwnsData = 4;

// The beginning of PyArray_Descr, alike in NumPy 1 and 2.
struct ArrayDtype {
  PyObject ob_base;
  PyTypeObject* scalar;
  char kind;
  char type;
};

// The Python objects that a tensor or node refers to through C++, which its tp_traverse may or may not show.
class HiddenObjects : public OwnedVisitor {
 public:
  void on_tensor(const Link&, const c10::TensorImpl&) override {}
  void on_storage(const Link&, const c10::StorageImpl&) override {}
  void on_node(const Link&, const Node& node) override { add(node.pyobj_slot()->load_pyobj()); }
  void on_hook(const Link&, const std::type_info& type, const void* hook) override {
    each_held_by_hook(type, hook, [this](PyObject* held) { add(held); });
  }
  void on_python(const Link&, const void*) override {}

  bool contains(PyObject* object) const {
    return std::find(objects_.begin(), objects_.end(), object) != objects_.end();
  }

 private:
  void add(PyObject* object) {
    if (object != nullptr) objects_.push_back(object);
  }
  std::vector<PyObject*> objects_;
};

int collect(PyObject* object, void* into) {
  static_cast<std::vector<PyObject*>*>(into)->push_back(object);
  return 0;
}

}  // namespace

// Feeds what C++ objects own into the graph.
class EdgeVisitor : public OwnedVisitor {
 public:
  EdgeVisitor(HeapGraph& graph, Vertex from) : graph_(graph), from_(from) {}

  void on_tensor(const Link&, const c10::TensorImpl& impl) override {
    graph_.refer(from_, next(), VertexKind::kTensor, &impl);
  }
  void on_storage(const Link&, const c10::StorageImpl& storage) override {
    graph_.refer(from_, next(), VertexKind::kStorage, &storage);
  }
  void on_node(const Link&, const Node& node) override {
    graph_.refer(from_, next(), VertexKind::kNode, &node);
  }
  void on_hook(const Link&, const std::type_info& type, const void* hook) override {
    const Label label = next();
    each_held_by_hook(type, hook, [&](PyObject* held) {
      if (held != nullptr) graph_.refer(from_, label, held);
    });
  }
  void on_python(const Link&, const void* object) override {
    graph_.refer(from_, next(), static_cast<PyObject*>(const_cast<void*>(object)));
  }

 private:
  Label next() { return Label::of_nth(nth_++); }
  HeapGraph& graph_;
  Vertex from_;
  uint64_t nth_ = 0;
};

// Answers the link with a number.
class LinkFinder : public OwnedVisitor {
 public:
  explicit LinkFinder(uint64_t wanted) : left_(wanted) {}

  const std::string& found() const { return found_; }
  void on_tensor(const Link& link, const c10::TensorImpl&) override { count(link); }
  void on_storage(const Link& link, const c10::StorageImpl&) override { count(link); }
  void on_node(const Link& link, const Node&) override { count(link); }
  void on_hook(const Link& link, const std::type_info&, const void*) override { count(link); }
  void on_python(const Link& link, const void*) override { count(link); }

 private:
  void count(const Link& link) {
    if (left_-- == 0) found_ = link.text();
  }
  uint64_t left_;
  std::string found_;
};

HeapGraph::HeapGraph(PyObject* own) : own_(own) {
  grow(1 << 12);
}
HeapGraph::~HeapGraph() = default;

// -- the table ----------------------------------------------------------------------------------------------

void HeapGraph::grow(size_t vertices) {
  const int bits = std::bit_width(2 * vertices + 1);
  if (bits <= bits_) return;
  bits_ = bits;
  slots_ = make_table<Slot>(size_t{1} << bits_);
  const size_t mask = (size_t{1} << bits_) - 1;
  for (Vertex vertex = 0; vertex < keys_.size(); ++vertex) {
    size_t at = slot_of(keys_[vertex]);
    while (slots_[at].key != 0) at = (at + 1) & mask;
    slots_[at] = {keys_[vertex], vertex};
  }
  keys_.reserve(vertices);
  parents_.reserve(vertices);
  labels_.reserve(vertices);
  queue_.reserve(vertices);
}

Vertex HeapGraph::vertex_of(uint64_t key) {
  const size_t mask = (size_t{1} << bits_) - 1;
  size_t at = slot_of(key);
  for (; slots_[at].key != 0; at = (at + 1) & mask) {
    if (slots_[at].key == key) return slots_[at].vertex;
  }
  const auto vertex = static_cast<Vertex>(keys_.size());
  slots_[at] = {key, vertex};
  keys_.push_back(key);
  parents_.push_back(kUnreached);
  labels_.push_back({});
  if (2 * keys_.size() > size_t{1} << bits_) grow(keys_.size());
  return vertex;
}

Vertex HeapGraph::watch(VertexKind kind, const void* object) {
  const Vertex vertex = vertex_of(key_of(kind, object));
  watched_ = keys_.size();
  return vertex;
}

// -- edges --------------------------------------------------------------------------------------------------

// Note [Three times around]
// An edge misses the cache twice: at the type of its object, and at the slot of its key. Each is asked for so
// many edges before it is used. First come, first served: the order of a breadth-first search is kept.
void HeapGraph::refer(Vertex from, Label label, PyObject* object) {
  __builtin_prefetch(&object->ob_type);
  refer(from, label, VertexKind::kObject, object);
}

void HeapGraph::refer(Vertex from, Label label, VertexKind kind, const void* object) {
  if (coming_end_ - coming_begin_ == kAhead) {
    const Pending& first = coming_[coming_begin_++ % kAhead];
    look_up_later(first.from, first.label, first.key);
  }
  coming_[coming_end_++ % kAhead] = {key_of(kind, object), label, from};
}

void HeapGraph::look_up_later(Vertex from, Label label, uint64_t key) {
  if ((key & 7) == static_cast<uint64_t>(VertexKind::kObject)) {
    auto* object = reinterpret_cast<PyObject*>(key);
    const Class found = classes_->of(Py_TYPE(object));
    if (found == Class::kLeaf || (found == Class::kAsk && PyObject_IS_GC(object) == 0)) return;
  }
  __builtin_prefetch(&slots_[slot_of(key)]);
  if (looked_up_end_ - looked_up_begin_ == kAhead) arrive(looked_up_[looked_up_begin_++ % kAhead]);
  looked_up_[looked_up_end_++ % kAhead] = {key, label, from};
}

void HeapGraph::arrive(const Pending& pending) {
  const Vertex to = vertex_of(pending.key);
  // The table of modules has a dictionary, which counts.
  if (to < watched_ && kind(pending.from) != VertexKind::kModules) {
    references_.push_back({pending.from, to, pending.label});
  }
  Vertex& parent = parents_[to];
  if (in_islands_ && parent >= kIsland) island_references_.push_back({pending.from, to, pending.label});
  if (parent != kUnreached) return;
  parent = in_islands_ ? kIsland : pending.from;
  labels_[to] = pending.label;
  queue_.push_back(to);
}

void HeapGraph::finish_pending() {
  while (coming_begin_ != coming_end_) {
    const Pending& first = coming_[coming_begin_++ % kAhead];
    look_up_later(first.from, first.label, first.key);
  }
  while (looked_up_begin_ != looked_up_end_) arrive(looked_up_[looked_up_begin_++ % kAhead]);
}

// -- vertices -----------------------------------------------------------------------------------------------

// Valid until the next object is asked.
std::span<PyObject* const> HeapGraph::children_of(PyObject* object) {
  visited_.clear();
  Py_TYPE(object)->tp_traverse(object, collect, &visited_);
  return visited_;
}

void HeapGraph::traverse(Vertex vertex, PyObject* object) {
  uint64_t nth = 0;
  for (PyObject* child : children_of(object)) refer(vertex, Label::of_nth(nth++), child);
}

// What an executing generator refers to beside what its frame does, which has a vertex of its own.
void HeapGraph::traverse_executing(Vertex vertex, PyObject* generator, const FrameReferences& frame) {
  std::unordered_map<const void*, size_t> of_frame;
  for (const FrameReferences::Slot& slot : frame.slots) ++of_frame[slot.value];
  ++of_frame[frame.function];
  ++of_frame[frame.variables];
  uint64_t nth = 0;
  for (PyObject* child : children_of(generator)) {
    if (const auto found = of_frame.find(child); found != of_frame.end() && found->second > 0) {
      --found->second;
    } else {
      refer(vertex, Label::of_nth(nth), child);
    }
    ++nth;
  }
}

void HeapGraph::expand_tensor(Vertex vertex, PyObject* object) {
  const auto* tensor = reinterpret_cast<const THPVariable*>(object);
  uint64_t nth = 0;
  HiddenObjects hidden;
  if (tensor->cdata.defined()) {
    const c10::TensorImpl& impl = *tensor->cdata.unsafeGetTensorImpl();
    visit_owned(impl, hidden);
    refer(vertex, Label::of_nth(nth++), VertexKind::kTensor, &impl);
  }
  // These are the object's own, beside those of the hooks in C++ that name the same dictionaries.
  for (PyObject* own : {tensor->backward_hooks, tensor->post_accumulate_grad_hooks}) {
    if (own != nullptr) refer(vertex, Label::of_nth(nth++), own);
  }
  for (PyObject* child : children_of(object)) {
    const bool counted = child == tensor->backward_hooks || child == tensor->post_accumulate_grad_hooks;
    if (!counted && !hidden.contains(child)) refer(vertex, Label::of_nth(nth++), child);
  }
}

void HeapGraph::expand_node_object(Vertex vertex, PyObject* object) {
  uint64_t nth = 0;
  HiddenObjects hidden;
  if (const Node* node = unpack_node(object)) {
    visit_owned(*node, nullptr, hidden);
    refer(vertex, Label::of_nth(nth++), VertexKind::kNode, node);
  }
  for (PyObject* child : children_of(object)) {
    if (!hidden.contains(child)) refer(vertex, Label::of_nth(nth++), child);
  }
}

void HeapGraph::expand_array(Vertex vertex, PyObject* object) {
  const auto* array = reinterpret_cast<const Array*>(object);
  if (array->base != nullptr) refer(vertex, Label::of_nth(0), array->base);
  if (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HAVE_GC) != 0) traverse(vertex, object);
  const auto* dtype = reinterpret_cast<const ArrayDtype*>(array->descr);
  const bool own_objects = dtype->type == 'O' && (array->flags & kArrayOwnsData) != 0;
  if (!own_objects || array->data == nullptr) return;
  Py_ssize_t count = 1;  // an array that owns its memory has all of it in one piece
  for (int i = 0; i < array->dims; ++i) count *= array->dimensions[i];
  auto* const* items = reinterpret_cast<PyObject* const*>(array->data);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (items[i] != nullptr) refer(vertex, Label::of_nth(static_cast<uint64_t>(i) + 1), items[i]);
  }
}

void HeapGraph::expand_capsule(Vertex vertex, PyObject* capsule) {
  for (const char* name : {"dltensor", "dltensor_versioned"}) {
    if (PyCapsule_IsValid(capsule, name) == 0) continue;
    const void* managed = PyCapsule_GetPointer(capsule, name);
    const void* context = name[8] == 0 ? static_cast<const DLManagedTensor*>(managed)->manager_ctx
                                       : static_cast<const DLManagedTensorVersioned*>(managed)->manager_ctx;
    const at::Tensor* lent = compat::dlpack_tensor(context, managed);
    if (lent != nullptr) refer(vertex, Label::of_nth(0), VertexKind::kTensor, lent->unsafeGetTensorImpl());
  }
}

void HeapGraph::expand_object(Vertex vertex, PyObject* object) {
  switch (classes_->of(Py_TYPE(object))) {
    case Class::kDict: {
#if PY_VERSION_HEX >= 0x030D0000
      // An instance's dictionary may share the instance's own values, which only one of them visits.
      if (reinterpret_cast<const PyDictObject*>(object)->ma_values != nullptr)
        return traverse(vertex, object);
#endif
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      uint64_t nth = 0;
      while (PyDict_Next(object, &position, &key, &value) != 0) {
        if (!PyUnicode_CheckExact(key)) refer(vertex, Label::of_nth(nth++, Label::Kind::kIsKey), key);
        refer(vertex, Label::of_key(key), value);
      }
      return;
    }
    case Class::kSequence: {
      PyObject* const* items = PySequence_Fast_ITEMS(object);
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (items[i] != nullptr) refer(vertex, Label::of_nth(static_cast<uint64_t>(i)), items[i]);
      }
      return;
    }
    case Class::kTensor:
      return expand_tensor(vertex, object);
    case Class::kStorage:
      if (const auto* storage = reinterpret_cast<const THPStorage*>(object)->cdata.unsafeGetStorageImpl()) {
        refer(vertex, Label::of_nth(0), VertexKind::kStorage, storage);
      }
      return traverse(vertex, object);
    case Class::kNode:
      return expand_node_object(vertex, object);
    case Class::kArray:
      return expand_array(vertex, object);
    case Class::kCapsule:
      return expand_capsule(vertex, object);
    case Class::kSaved:
      if (const auto* saved = unpack_saved(object)) {
        const at::Tensor& kept = compat::saved_data(*saved);
        if (kept.defined()) refer(vertex, Label::of_nth(0), VertexKind::kTensor, kept.unsafeGetTensorImpl());
      }
      return;
    case Class::kPlain:
    case Class::kAsk:
      // An executing frame's object, which on Python 3.10 shows what the frame's own vertex does.
      if (is_executing(object)) return;
      if (!generators_.empty()) {
        const auto found = generators_.find(object);
        if (found != generators_.end()) return traverse_executing(vertex, object, frames_[found->second]);
      }
      return traverse(vertex, object);
    case Class::kLeaf:
      return;
  }
}

void HeapGraph::expand_modules(Vertex vertex) {
  PyObject* modules = PyImport_GetModuleDict();
  if (modules == nullptr || !PyDict_Check(modules)) return;
  PyObject* main = PyDict_GetItemString(modules, "__main__");
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* module = nullptr;
  for (const bool is_main : {true, false}) {
    position = 0;
    while (PyDict_Next(modules, &position, &key, &module) != 0) {
      if ((module == main) == is_main) refer(vertex, Label::of_key(key), module);
    }
  }
}

// What has owners beside its Python object keeps that alive.
template <class Owner>
void HeapGraph::refer_to_python(Vertex vertex, const Owner& owner) {
  PyObject* python = owner.pyobj_slot()->load_pyobj();
  if (python != nullptr && use_count_of(owner) > 1) refer(vertex, Label::of_nth(kOwnObject), python);
}

void HeapGraph::expand(Vertex vertex) {
  const void* const at = object(vertex);
  if (!closed_.empty() && closed_.contains(at)) return;
  switch (kind(vertex)) {
    case VertexKind::kObject:
      return expand_object(vertex, static_cast<PyObject*>(const_cast<void*>(at)));
    case VertexKind::kTensor: {
      const auto& impl = *static_cast<const c10::TensorImpl*>(at);
      EdgeVisitor edges(*this, vertex);
      visit_owned(impl, edges);
      return refer_to_python(vertex, impl);
    }
    case VertexKind::kStorage: {
      const auto& storage = *static_cast<const c10::StorageImpl*>(at);
      EdgeVisitor edges(*this, vertex);
      visit_owned(storage, edges);
      return refer_to_python(vertex, storage);
    }
    case VertexKind::kNode: {
      const auto& node = *static_cast<const Node*>(at);
      EdgeVisitor edges(*this, vertex);
      busy_ += visit_owned(node, saved_by_python, edges) ? 0 : 1;
      return refer_to_python(vertex, node);
    }
    case VertexKind::kFrame: {
      const FrameReferences& frame = frames_[number_of(vertex)];
      uint64_t nth = 0;
      for (const FrameReferences::Slot& slot : frame.slots) refer(vertex, Label::of_nth(nth++), slot.value);
      for (PyObject* further : {frame.function, frame.variables}) {
        if (further != nullptr) refer(vertex, Label::of_nth(nth), further);
        ++nth;
      }
      return;
    }
    case VertexKind::kThread: {
      uint64_t nth = 0;
      for (const ThreadReference& reference : thread_references_[number_of(vertex)]) {
        refer(vertex, Label::of_nth(nth++), reference.value);
      }
      return;
    }
    case VertexKind::kModules:
      return expand_modules(vertex);
    case VertexKind::kUnknown:
      return;
  }
}

// -- the walk -----------------------------------------------------------------------------------------------

bool HeapGraph::starts_with_own(PyObject* text) const {
  return own_ != nullptr && PyUnicode_Tailmatch(text, own_, 0, PY_SSIZE_T_MAX, -1) == 1;
}

bool HeapGraph::is_executing(PyObject* object) const {
  return Py_TYPE(object) == &PyFrame_Type &&
         std::any_of(frames_.begin(), frames_.end(),
                     [&](const auto& frame) { return frame.object == object; });
}

Vertex HeapGraph::add_root(VertexKind kind, uint64_t number) {
  const Vertex vertex = vertex_of(number << 3 | static_cast<uint64_t>(kind));
  parents_[vertex] = kRoot;
  queue_.push_back(vertex);
  return vertex;
}

// Asks for what the next vertices' objects point to: the items of a list, the entries of a dictionary.
void HeapGraph::ask_ahead() const {
  const size_t far = expanded_ + 2 * kExpandAhead;
  if (far < queue_.size()) __builtin_prefetch(object(queue_[far]));
  const size_t near = expanded_ + kExpandAhead;
  if (near >= queue_.size() || kind(queue_[near]) != VertexKind::kObject) return;
  const auto* coming = static_cast<const PyObject*>(object(queue_[near]));
  if (PyList_CheckExact(coming)) {
    __builtin_prefetch(reinterpret_cast<const PyListObject*>(coming)->ob_item);
  } else if (PyDict_CheckExact(coming)) {
    __builtin_prefetch(reinterpret_cast<const PyDictObject*>(coming)->ma_keys);
  }
}

void HeapGraph::walk_from_here() {
  while (true) {
    while (expanded_ < queue_.size()) {
      ask_ahead();
      expand(queue_[expanded_++]);
    }
    finish_pending();
    if (expanded_ == queue_.size()) return;
  }
}

void HeapGraph::read_threads() {
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  for (; thread != nullptr; thread = PyThreadState_Next(thread)) {
    read_references(thread, frames_);
    frame_threads_.resize(frames_.size(), thread->thread_id);
    thread_ids_.push_back(thread->thread_id);
    read_references(thread, thread_references_.emplace_back());
    const auto is_own_code = [this](PyCodeObject* code) { return starts_with_own(code->co_filename); };
    c_code_between_ = c_code_between_ || tensorplay::python::has_c_code_between(thread, is_own_code);
  }
  for (size_t i = 0; i < frames_.size(); ++i) {
    if (frames_[i].generator != nullptr) generators_.emplace(frames_[i].generator, i);
  }
}

bool HeapGraph::walk() {
  const CollectionPause pause;
  std::vector<PyObject*> objects;
  if (!find_objects([](PyTypeObject*) { return true; }, objects)) return false;
  Classes known(array_class());
  classes_ = &known;
  grow(objects.size() + objects.size() / 4);
  read_threads();
  add_root(VertexKind::kModules, 0);
  const auto add_frames = [&](bool own) {
    for (size_t i = 0; i < frames_.size(); ++i) {
      if (starts_with_own(frames_[i].code->co_filename) == own) add_root(VertexKind::kFrame, i);
    }
  };
  add_frames(false);
  for (size_t i = 0; i < thread_ids_.size(); ++i) add_root(VertexKind::kThread, i);
  walk_from_here();
  add_frames(true);
  walk_from_here();
  find_islands(objects);
  classes_ = nullptr;
  return true;
}

// Note [Islands]
// What no root leads to is either held by C or C++ code, as a static variable or a container that does not
// show its contents, or it is garbage: a cycle that the collector has not met yet. An object of it that has
// more references than lead to it within is held from outside, and so is all it leads to.
void HeapGraph::find_islands(std::span<PyObject* const> objects) {
  in_islands_ = true;
  const size_t before = queue_.size();
  for (size_t i = 0; i < objects.size(); ++i) {
    if (i + kAhead < objects.size()) {
      __builtin_prefetch(&slots_[slot_of(key_of(VertexKind::kObject, objects[i + kAhead]))]);
    }
    const Vertex vertex = vertex_of(key_of(VertexKind::kObject, objects[i]));
    if (parents_[vertex] != kUnreached) continue;
    parents_[vertex] = kIsland;
    queue_.push_back(vertex);
  }
  walk_from_here();
  const std::vector<Vertex> islands(queue_.begin() + static_cast<std::ptrdiff_t>(before), queue_.end());
  sort_island_references();

  std::vector<uint32_t> known(keys_.size());
  for (const Reference& reference : island_references_) ++known[reference.to];
  const Vertex unknown = add_root(VertexKind::kUnknown, 0);
  queue_.clear();
  for (const Vertex vertex : islands) {
    if (count(vertex) <= known[vertex]) continue;
    const Vertex keeper = keeper_of(vertex);
    parents_[vertex] = keeper == kNoVertex ? unknown : keeper;
    labels_[vertex] = Label::of_nth(keeper == kNoVertex ? count(vertex) - known[vertex] : kOwnObject);
    queue_.push_back(vertex);
  }
  for (size_t next = 0; next < queue_.size(); ++next) {
    for (const Reference& reference : references_from(queue_[next])) {
      if (parents_[reference.to] != kIsland) continue;
      parents_[reference.to] = reference.from;
      labels_[reference.to] = reference.label;
      queue_.push_back(reference.to);
    }
  }
}

// The frame on whose evaluation stack an object lies, where how far that is filled is not known.
Vertex HeapGraph::keeper_of(Vertex vertex) const {
  for (size_t i = 0; i < frames_.size(); ++i) {
    const auto& stack = frames_[i].unknown_stack;
    if (std::find(stack.begin(), stack.end(), object(vertex)) == stack.end()) continue;
    const uint64_t key = i << 3 | static_cast<uint64_t>(VertexKind::kFrame);
    const size_t mask = (size_t{1} << bits_) - 1;
    for (size_t at = slot_of(key); slots_[at].key != 0; at = (at + 1) & mask) {
      if (slots_[at].key == key) return slots_[at].vertex;
    }
  }
  return kNoVertex;
}

void HeapGraph::sort_island_references() {
  std::stable_sort(island_references_.begin(), island_references_.end(),
                   [](const Reference& a, const Reference& b) { return a.from < b.from; });
}

std::span<const Reference> HeapGraph::references_from(Vertex vertex) const {
  const auto [begin, end] =
      std::equal_range(island_references_.begin(), island_references_.end(), Reference{vertex, 0, {}},
                       [](const auto& a, const auto& b) { return a.from < b.from; });
  return {begin, end};
}

// -- answers ------------------------------------------------------------------------------------------------

bool HeapGraph::is_own(Vertex vertex) const {
  while (parent(vertex) != kNoVertex) vertex = parent(vertex);
  return kind(vertex) == VertexKind::kFrame && parents_[vertex] == kRoot &&
         starts_with_own(frame(vertex).code->co_filename);
}

uint64_t HeapGraph::count(Vertex vertex) const {
  switch (kind(vertex)) {
    case VertexKind::kObject:
      return static_cast<uint64_t>(Py_REFCNT(static_cast<PyObject*>(const_cast<void*>(object(vertex)))));
    case VertexKind::kTensor:
      return use_count_of(*static_cast<const c10::TensorImpl*>(object(vertex)));
    case VertexKind::kStorage:
      return use_count_of(*static_cast<const c10::StorageImpl*>(object(vertex)));
    case VertexKind::kNode:
      return use_count_of(*static_cast<const Node*>(object(vertex)));
    default:
      return 0;
  }
}

size_t HeapGraph::on_unknown_stacks(Vertex vertex) const {
  size_t found = 0;
  for (const FrameReferences& frame : frames_) {
    found += static_cast<size_t>(
        std::count(frame.unknown_stack.begin(), frame.unknown_stack.end(), object(vertex)));
  }
  return found;
}

namespace {

// The references along a shortest way between two vertices, of which each fulfils a condition.
template <class From, class May>
std::vector<Reference> shortest_way(Vertex begin, Vertex end, From references_from, May may_use) {
  std::unordered_map<Vertex, Reference> reached;
  std::vector<Vertex> queue{begin};
  for (size_t next = 0; next < queue.size(); ++next) {
    for (const Reference& reference : references_from(queue[next])) {
      if (!may_use(reference) || !reached.emplace(reference.to, reference).second) continue;
      if (reference.to != end) {
        queue.push_back(reference.to);
        continue;
      }
      std::vector<Reference> way;
      for (Vertex at = end; way.empty() || at != begin; at = way.back().from) way.push_back(reached.at(at));
      return {way.rbegin(), way.rend()};
    }
  }
  return {};
}

}  // namespace

// Note [Where the cycles are]
// What has nothing below it lies on no cycle, and when it is taken away the same may hold for what is above.
// What remains lies on a cycle, or between two.
void HeapGraph::find_cyclic() const {
  std::unordered_map<Vertex, size_t> below;
  for (const Reference& reference : island_references_) {
    if (!is_garbage(reference.from) || !is_garbage(reference.to)) continue;
    above_[reference.to].push_back(reference);
    ++below[reference.from];
  }
  std::vector<Vertex> without;
  for (const auto& [vertex, from] : above_) {
    if (!below.contains(vertex)) without.push_back(vertex);
  }
  while (!without.empty()) {
    const auto found = above_.find(without.back());
    without.pop_back();
    if (found == above_.end()) continue;
    for (const Reference& reference : found->second) {
      if (--below[reference.from] == 0) without.push_back(reference.from);
    }
  }
  for (const auto& [vertex, count] : below) {
    if (count > 0) cyclic_.insert(vertex);
  }
}

const void* HeapGraph::python_object_of(Vertex vertex) const {
  switch (kind(vertex)) {
    case VertexKind::kTensor:
      return static_cast<const c10::TensorImpl*>(object(vertex))->pyobj_slot()->load_pyobj();
    case VertexKind::kStorage:
      return static_cast<const c10::StorageImpl*>(object(vertex))->pyobj_slot()->load_pyobj();
    case VertexKind::kNode:
      return static_cast<const Node*>(object(vertex))->pyobj_slot()->load_pyobj();
    default:
      return nullptr;
  }
}

bool HeapGraph::is_within_one(const Reference& reference) const {
  return object(reference.from) == python_object_of(reference.to) ||
         object(reference.to) == python_object_of(reference.from);
}

HeapGraph::Cycle HeapGraph::cycle_above(Vertex vertex) const {
  if (!is_garbage(vertex)) return {};
  if (above_.empty()) find_cyclic();
  const auto forward = [this](Vertex at) { return references_from(at); };
  std::unordered_map<Vertex, Reference> below;  // the next reference of the way down, of all but the vertex
  std::vector<Vertex> queue{vertex};
  size_t tried = 0;
  for (size_t next = 0; next < queue.size() && tried < kMostTried; ++next) {
    const Vertex at = queue[next];
    if (cyclic_.contains(at)) {
      ++tried;
      // A tensor that C++ holds and its Python object refer to each other: a cycle uses one of the two at
      // most.
      const auto away = [&](const Reference& step) {
        return cyclic_.contains(step.to) && !(step.from == at && is_within_one(step));
      };
      const auto back = [&](const Reference& step) {
        return cyclic_.contains(step.to) && !(step.to == at && is_within_one(step));
      };
      Cycle cycle{shortest_way(at, at, forward, away), {}};
      if (cycle.around.empty()) cycle.around = shortest_way(at, at, forward, back);
      for (Vertex step = at; step != vertex; step = cycle.way.back().to) cycle.way.push_back(below.at(step));
      if (!cycle.around.empty()) return cycle;
    }
    const auto found = above_.find(at);
    if (found == above_.end()) continue;
    for (const Reference& reference : found->second) {
      if (reference.from != vertex && below.emplace(reference.from, reference).second) {
        queue.push_back(reference.from);
      }
    }
  }
  return {};
}

std::string HeapGraph::link_text(Vertex from, Label label) const {
  if (label.kind() != Label::Kind::kNth) return {};
  if (label.nth() == kOwnObject) return "Python object";
  LinkFinder finder(label.nth());
  switch (kind(from)) {
    case VertexKind::kTensor:
      visit_owned(*static_cast<const c10::TensorImpl*>(object(from)), finder);
      break;
    case VertexKind::kStorage:
      visit_owned(*static_cast<const c10::StorageImpl*>(object(from)), finder);
      break;
    case VertexKind::kNode:
      visit_owned(*static_cast<const Node*>(object(from)), saved_by_python, finder);
      break;
    default:
      break;
  }
  return finder.found();
}

}  // namespace tensorplay::python
