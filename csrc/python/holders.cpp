// The Python face of heap_graph.h: who refers to some tensors, and every storage with who keeps it.
#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include "../core/owners.h"
#include "../core/read.h"
#include "call.h"
#include "graph.h"
#include "heap_graph.h"
#include "holders.h"
#include "record.h"
#include "values.h"

namespace tensorplay::python {
namespace {

const char* kind_name(VertexKind kind) {
  switch (kind) {
    case VertexKind::kObject:
      return "object";
    case VertexKind::kTensor:
      return "impl";
    case VertexKind::kStorage:
      return "storage";
    case VertexKind::kNode:
      return "node";
    case VertexKind::kFrame:
      return "frame";
    case VertexKind::kThread:
      return "thread";
    case VertexKind::kModules:
      return "modules";
    case VertexKind::kUnknown:
      return "unknown";
  }
  return "unknown";
}

PyObject* borrowed(const void* object) {
  return static_cast<PyObject*>(const_cast<void*>(object));
}

// The vertices that an answer names, each once: (kind, object, address, name, how, parent).
class Entries {
 public:
  explicit Entries(const HeapGraph& graph) : graph_(graph), list_(PyList_New(0)) {}

  bool failed() const { return list_ == nullptr || failed_; }
  PyObject* list() const { return list_.get(); }

  // The number of a vertex's entry, after those of the way from a root to it.
  Py_ssize_t number(Vertex vertex) {
    std::vector<Vertex> way;
    Py_ssize_t parent = -1;
    for (Vertex at = vertex; at != kNoVertex; at = graph_.parent(at)) {
      if (const auto found = numbers_.find(at); found != numbers_.end()) {
        parent = found->second;
        break;
      }
      way.push_back(at);
    }
    for (; !way.empty() && !failed(); way.pop_back()) parent = add(way.back(), parent);
    return parent;
  }

  // How one vertex refers to another: ("key", key), ("owns", what C++ calls it), ("variable", name), ("nth",
  // n)...
  PyObject* how(Vertex from, Label label) const {
    if (from == kNoVertex) return none();
    if (label.kind() == Label::Kind::kKey) return Py_BuildValue("sO", "key", label.key());
    if (label.kind() == Label::Kind::kIsKey) return Py_BuildValue("sK", "is_key", nth(label));
    switch (graph_.kind(from)) {
      case VertexKind::kTensor:
      case VertexKind::kStorage:
      case VertexKind::kNode:
        return Py_BuildValue("sN", "owns", text(graph_.link_text(from, label)));
      case VertexKind::kFrame: {
        const FrameReferences& frame = graph_.frame(from);
        if (label.nth() >= frame.slots.size()) return Py_BuildValue("sO", "variable", Py_None);
        PyObject* name = frame.slots[label.nth()].name;
        return Py_BuildValue("sO", "variable", name == nullptr ? Py_None : name);
      }
      case VertexKind::kThread:
        return Py_BuildValue("ss", "owns", graph_.thread_references(from)[label.nth()].name);
      default:
        return Py_BuildValue("sK", "nth", nth(label));
    }
  }

  // (entry, how, entry)
  PyObject* reference(const Reference& reference) {
    const Py_ssize_t from = number(reference.from);
    const Py_ssize_t to = number(reference.to);
    return failed() ? nullptr : Py_BuildValue("nNn", from, how(reference.from, reference.label), to);
  }

  PyObject* references(const std::vector<Reference>& all) {
    PyObject* list = PyList_New(0);
    for (const Reference& one : all) {
      PyObject* item = list == nullptr ? nullptr : reference(one);
      if (item == nullptr || PyList_Append(list, item) != 0) Py_CLEAR(list);
      Py_XDECREF(item);
    }
    return list;
  }

 private:
  static unsigned long long nth(Label label) { return label.nth(); }

  Py_ssize_t add(Vertex vertex, Py_ssize_t parent) {
    PyObject* object = object_of(vertex);
    PyObject* name = object == nullptr ? nullptr : name_of(vertex);
    const char* kind = graph_.kind(vertex) == VertexKind::kFrame && graph_.is_own(vertex)
                           ? "own"
                           : kind_name(graph_.kind(vertex));
    const Owned entry(name == nullptr
                          ? nullptr
                          : Py_BuildValue("sNNNNn", kind, object, address(graph_.object(vertex)), name,
                                          how(graph_.parent(vertex), graph_.label(vertex)), parent));
    if (name == nullptr) Py_XDECREF(object);
    failed_ = entry == nullptr || PyList_Append(list_.get(), entry.get()) != 0;
    const Py_ssize_t number = PyList_GET_SIZE(list_.get()) - 1;
    numbers_.emplace(vertex, number);
    return number;
  }

  // The Python object of a vertex, or a record of a tensor without one.
  PyObject* object_of(Vertex vertex) const {
    const void* at = graph_.object(vertex);
    switch (graph_.kind(vertex)) {
      case VertexKind::kObject:
        return Py_NewRef(borrowed(at));
      case VertexKind::kTensor: {
        const auto& impl = *static_cast<const c10::TensorImpl*>(at);
        PyObject* python = impl.pyobj_slot()->load_pyobj();
        return python != nullptr ? Py_NewRef(python) : none();
      }
      default:
        return none();
    }
  }

  PyObject* name_of(Vertex vertex) const {
    switch (graph_.kind(vertex)) {
      case VertexKind::kNode:
        return node_name(*static_cast<const torch::autograd::Node*>(graph_.object(vertex)));
      case VertexKind::kFrame: {
        const FrameReferences& frame = graph_.frame(vertex);
        return Py_BuildValue("OOik", frame.code->co_filename, code_name(frame.code), frame.line,
                             graph_.thread_of_frame(vertex));
      }
      case VertexKind::kThread:
        return PyLong_FromUnsignedLong(graph_.thread(vertex));
      case VertexKind::kTensor:
      default:
        return none();
    }
  }

  const HeapGraph& graph_;
  Owned list_;
  std::unordered_map<Vertex, Py_ssize_t> numbers_;
  bool failed_ = false;
};

// Takes the reference to the item; false with an exception set.
bool append(PyObject* list, PyObject* item) {
  const bool done = item != nullptr && PyList_Append(list, item) == 0;
  Py_XDECREF(item);
  return done;
}

// Whether a root leads to a vertex, and which; the observer's own frames are none.
enum class State : uint8_t { kUnseen, kReached, kCycle, kUnknown, kOwn };

const char* name_of(State state) {
  constexpr const char* names[] = {"unseen", "reached", "cycle", "unknown", "probe"};
  return names[static_cast<size_t>(state)];
}

State state_of_root(const HeapGraph& graph, Vertex root) {
  if (graph.is_garbage(root)) return State::kCycle;
  if (!graph.is_reached(root)) return State::kUnseen;
  if (graph.kind(root) == VertexKind::kUnknown) return State::kUnknown;
  return graph.is_own(root) ? State::kOwn : State::kReached;
}

// Of some vertices, each step of the ways to them taken once.
class States {
 public:
  explicit States(const HeapGraph& graph) : graph_(graph), known_(graph.size(), kNotKnown) {}

  State of(Vertex vertex) {
    Vertex top = vertex;
    while (known_[top] == kNotKnown && graph_.parent(top) != kNoVertex) top = graph_.parent(top);
    if (known_[top] == kNotKnown) known_[top] = static_cast<uint8_t>(state_of_root(graph_, top));
    const uint8_t state = known_[top];
    for (; vertex != top; vertex = graph_.parent(vertex)) known_[vertex] = state;
    return static_cast<State>(state);
  }

 private:
  static constexpr uint8_t kNotKnown = UINT8_MAX;
  const HeapGraph& graph_;
  std::vector<uint8_t> known_;
};

// ((around, way), ...) as lists of references, or None.
PyObject* cycle_of(const HeapGraph& graph, Vertex vertex, Entries& entries) {
  if (!graph.is_garbage(vertex)) return none();
  const HeapGraph::Cycle cycle = graph.cycle_above(vertex);
  if (cycle.around.empty()) return none();
  return Py_BuildValue("NN", entries.references(cycle.around), entries.references(cycle.way));
}

bool read_kind(PyObject* name, VertexKind& kind) {
  for (const VertexKind one :
       {VertexKind::kObject, VertexKind::kTensor, VertexKind::kStorage, VertexKind::kNode}) {
    if (PyUnicode_CompareWithASCIIString(name, kind_name(one)) == 0) {
      kind = one;
      return true;
    }
  }
  PyErr_Format(PyExc_ValueError, "a watched thing is an object, impl, storage or node, got %R", name);
  return false;
}

// find_holders([(kind, address), ...], own, [address of an object that leads nowhere, ...])
PyObject* find_holders(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 3, "find_holders(watched, own, closed=[])")) return nullptr;
  if (!PyList_Check(args[0]) || !PyUnicode_Check(args[1]) || (count > 2 && !PyList_Check(args[2]))) {
    PyErr_SetString(PyExc_TypeError, "find_holders() takes a list of (kind, address) and a str");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    HeapGraph graph(args[1]);
    for (Py_ssize_t i = 0; count > 2 && i < PyList_GET_SIZE(args[2]); ++i) {
      const unsigned long long at = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[2], i));
      if (PyErr_Occurred() != nullptr) return nullptr;
      graph.close(reinterpret_cast<const void*>(at));
    }
    std::vector<Vertex> watched;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
      PyObject* name = nullptr;
      unsigned long long at = 0;
      VertexKind kind{};
      if (!PyArg_ParseTuple(PyList_GET_ITEM(args[0], i), "OK", &name, &at) || !read_kind(name, kind))
        return nullptr;
      watched.push_back(graph.watch(kind, reinterpret_cast<const void*>(at)));
    }
    if (!graph.walk()) return nullptr;
    struct Watched {
      uint64_t count = 0;
      Owned references;
    };
    std::unordered_map<Vertex, Watched> found;
    for (const Vertex vertex : watched) {  // counted before the answer refers to them
      const bool seen = graph.is_garbage(vertex) || graph.is_reached(vertex);
      found[vertex].count = seen ? graph.count(vertex) : 0;
    }
    for (auto& [vertex, one] : found) one.references.reset(PyList_New(0));
    Entries entries(graph);
    for (const Reference& reference : graph.references()) {
      PyObject* list = found.at(reference.to).references.get();
      if (list == nullptr || !append(list, Py_BuildValue("nN", entries.number(reference.from),
                                                         entries.how(reference.from, reference.label)))) {
        return nullptr;
      }
    }
    const Owned answers(PyList_New(0));
    States states(graph);
    for (const Vertex vertex : watched) {
      PyObject* cycle = answers == nullptr ? nullptr : cycle_of(graph, vertex, entries);
      if (cycle == nullptr) return nullptr;
      const Watched& one = found.at(vertex);
      PyObject* answer = Py_BuildValue(
          "KOnsN", static_cast<unsigned long long>(one.count), one.references.get(),
          static_cast<Py_ssize_t>(graph.on_unknown_stacks(vertex)), name_of(states.of(vertex)), cycle);
      if (!append(answers.get(), answer)) return nullptr;
    }
    if (entries.failed()) return nullptr;
    return Py_BuildValue("OOnn", entries.list(), answers.get(), static_cast<Py_ssize_t>(graph.busy_nodes()),
                         static_cast<Py_ssize_t>(graph.size()));
  });
}

// "object" is the Python object of a tensor or storage, "holder" another one, as a DLPack capsule.
std::string owner_text(const HeapGraph& graph, const Reference& reference) {
  if (graph.kind(reference.from) != VertexKind::kObject) {
    return graph.link_text(reference.from, reference.label);
  }
  return graph.object(reference.from) == graph.python_object_of(reference.to) ? "object" : "holder";
}

// find_owners(kind, [address, ...])
PyObject* find_owners(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "find_owners(kind, addresses)")) return nullptr;
  VertexKind kind{};
  if (!PyUnicode_Check(args[0]) || !PyList_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "find_owners() takes a str and a list of addresses");
    return nullptr;
  }
  if (!read_kind(args[0], kind)) return nullptr;
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    HeapGraph graph(nullptr);
    std::vector<Vertex> watched;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
      const unsigned long long at = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[1], i));
      if (PyErr_Occurred() != nullptr) return nullptr;
      watched.push_back(graph.watch(kind, reinterpret_cast<const void*>(at)));
    }
    if (!graph.walk()) return nullptr;
    std::unordered_map<Vertex, Owned> links;
    for (const Vertex vertex : watched) links[vertex].reset(PyList_New(0));
    for (const Reference& reference : graph.references()) {
      PyObject* link = text(owner_text(graph, reference));
      PyObject* list = links.at(reference.to).get();
      if (list == nullptr || !append(list, link)) return nullptr;
    }
    const Owned answers(PyList_New(0));
    for (const Vertex vertex : watched) {
      const bool seen = graph.is_garbage(vertex) || graph.is_reached(vertex);
      const uint64_t total = seen ? graph.count(vertex) : 0;
      PyObject* answer = Py_BuildValue("KO", static_cast<unsigned long long>(total), links.at(vertex).get());
      if (answers == nullptr || !append(answers.get(), answer)) return nullptr;
    }
    return Py_NewRef(answers.get());
  });
}

// Goes up from a storage to its tensor, and to that tensor's Python object.
Vertex holder_of(const HeapGraph& graph, Vertex storage) {
  const Vertex tensor = graph.parent(storage);
  if (tensor == kNoVertex || graph.kind(tensor) != VertexKind::kTensor) return storage;
  const Vertex object = graph.parent(tensor);
  if (object == kNoVertex || graph.kind(object) != VertexKind::kObject) return tensor;
  return graph.object(object) == graph.python_object_of(tensor) ? object : tensor;
}

// A storage as it is tallied: four numbers of an array.
struct Tally {
  uint64_t address;
  uint64_t pointer;
  int64_t nbytes;
  uint64_t garbage;  // whether nothing but a cycle holds it

  auto key() const { return std::tuple(address, pointer, nbytes); }
};

// Sorted by address. False with an exception set for what is no tally.
bool read_tally(PyObject* object, std::vector<Tally>& out) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) != 0) return false;
  const bool whole = buffer.len % static_cast<Py_ssize_t>(sizeof(Tally)) == 0;
  if (whole) {
    out.resize(static_cast<size_t>(buffer.len) / sizeof(Tally));
    std::memcpy(out.data(), buffer.buf, static_cast<size_t>(buffer.len));
    std::ranges::sort(out, {}, &Tally::address);
  } else {
    PyErr_SetString(PyExc_ValueError, "a tally has four numbers for each storage");
  }
  PyBuffer_Release(&buffer);
  return whole;
}

bool has(const std::vector<Tally>& known, const Tally& tally) {
  const auto found = std::ranges::lower_bound(known, tally.address, {}, &Tally::address);
  return found != known.end() && found->key() == tally.key();
}

// Storages that are held alike: paths lead to them that differ in nothing but the indices of containers. Of
// few alike each is a group of its own.
class Alikes {
 public:
  struct Member {
    Vertex holder;
    Vertex place;  // the first tensor with a new storage on the way to the holder, which may be itself
    State state;
    c10::Device device;
    uint64_t address;
    uint64_t nbytes;
  };
  using Group = std::vector<Member>;

  // Objects of the types `apart` are never taken for one another; those `indexed` hold any number of equals.
  Alikes(const HeapGraph& graph, std::vector<PyTypeObject*> apart, std::vector<PyTypeObject*> indexed)
      : graph_(graph), apart_(std::move(apart)), indexed_(std::move(indexed)) {}

  void expect(Vertex holder) {
    new_.insert(holder);
    for (Vertex at = holder; at != kNoVertex && met_.insert(at).second; at = graph_.parent(at)) {
      if (is_value(at) && ++values_[graph_.parent(at)] == kMany) crowded_.push_back(graph_.parent(at));
    }
  }

  // After all are expected.
  void add(Vertex holder, State state, c10::Device device, const Tally& tally) {
    const Way way = way_to(holder);
    size_t at = groups_.size();
    if (state != State::kCycle) {  // garbage is told by its cycle, each for itself
      const bool direct = way.place == holder;
      at = numbers_.try_emplace({way.pattern, device.type(), device.index(), direct}, at).first->second;
    }
    if (at == groups_.size()) groups_.emplace_back();
    groups_[at].push_back(
        {holder, way.place, state, device, tally.address, static_cast<uint64_t>(tally.nbytes)});
  }

  std::vector<Group> groups() const {
    std::vector<Group> found;
    for (const Group& alike : groups_) {
      std::unordered_map<Vertex, Group> by_place;
      for (const Member& member : alike) {
        by_place[member.place].push_back(member);
        if (by_place.size() > kFew) break;
      }
      if (by_place.size() > kFew) {
        found.push_back(alike);
        continue;
      }
      for (const Member& member : alike) {  // in their order
        if (const auto one = by_place.extract(member.place); !one.empty()) found.push_back(one.mapped());
      }
    }
    return found;
  }

  // Dictionaries with so many values on the ways that their keys are taken for indices.
  const std::vector<Vertex>& crowded() const { return crowded_; }

 private:
  static constexpr size_t kMany = 17;
  static constexpr size_t kFew = 16;
  struct Way {
    uint32_t pattern = UINT32_MAX;
    Vertex place = kNoVertex;
  };
  using Step = std::tuple<uint32_t, uint64_t, uint64_t, bool>;

  Way way_to(Vertex vertex) {
    std::vector<Vertex> steps;
    Way way;
    for (Vertex at = vertex; at != kNoVertex; at = graph_.parent(at)) {
      if (const auto found = ways_.find(at); found != ways_.end()) {
        way = found->second;
        break;
      }
      steps.push_back(at);
    }
    for (; !steps.empty(); steps.pop_back()) {
      const Vertex at = steps.back();
      const bool is_new = new_.contains(at);
      if (is_new && way.place == kNoVertex) way.place = at;
      const Step step{way.pattern, step_to(at), what(at), is_new};
      way.pattern = patterns_.try_emplace(step, static_cast<uint32_t>(patterns_.size())).first->second;
      ways_.emplace(at, way);
    }
    return way;
  }

  // How the vertex above refers to it, without an index.
  uint64_t step_to(Vertex vertex) const {
    const Vertex above = graph_.parent(vertex);
    const Label label = graph_.label(vertex);
    constexpr uint64_t any = UINT64_MAX;
    if (above == kNoVertex || label.kind() == Label::Kind::kIsKey) return any;
    if (label.kind() == Label::Kind::kKey) {
      const bool is_index =
          PyLong_CheckExact(label.key()) || (is_value(vertex) && values_.at(above) >= kMany);
      return is_index ? any : label.bits;
    }
    if (graph_.kind(above) != VertexKind::kObject) return label.bits;
    const PyTypeObject* type = Py_TYPE(borrowed(graph_.object(above)));
    return std::ranges::find(indexed_, type) == indexed_.end() ? label.bits : any;
  }

  bool is_value(Vertex vertex) const {
    const Vertex above = graph_.parent(vertex);
    return above != kNoVertex && graph_.kind(above) == VertexKind::kObject &&
           graph_.label(vertex).kind() == Label::Kind::kKey;
  }

  // What stands for all that is named like it: its type, or itself.
  uint64_t what(Vertex vertex) const {
    const VertexKind kind = graph_.kind(vertex);
    if (graph_.parent(vertex) == kNoVertex) return uint64_t{vertex} << 3 | 1;  // no address is odd
    if (kind == VertexKind::kNode) {
      const auto& node = *static_cast<const torch::autograd::Node*>(graph_.object(vertex));
      return reinterpret_cast<uint64_t>(typeid(node).name());
    }
    if (kind != VertexKind::kObject) return static_cast<uint64_t>(kind) << 1;
    PyTypeObject* type = Py_TYPE(borrowed(graph_.object(vertex)));
    const bool apart =
        std::ranges::any_of(apart_, [&](PyTypeObject* one) { return PyType_IsSubtype(type, one) != 0; });
    return apart ? uint64_t{vertex} << 3 | 1 : reinterpret_cast<uint64_t>(type);
  }

  const HeapGraph& graph_;
  std::vector<PyTypeObject*> apart_;
  std::vector<PyTypeObject*> indexed_;
  std::unordered_set<Vertex> new_;
  std::unordered_set<Vertex> met_;
  std::unordered_map<Vertex, size_t> values_;
  std::vector<Vertex> crowded_;
  std::unordered_map<Vertex, Way> ways_;
  std::map<Step, uint32_t> patterns_;
  std::map<std::tuple<uint32_t, c10::DeviceType, c10::DeviceIndex, bool>, size_t> numbers_;
  std::vector<Group> groups_;
};

bool read_types(PyObject* tuple, std::vector<PyTypeObject*>& out) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "find_storages() takes classes as a tuple");
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* type = PyTuple_GET_ITEM(tuple, i);
    if (!PyType_Check(type)) {
      PyErr_SetString(PyExc_TypeError, "find_storages() takes classes in its tuples");
      return false;
    }
    out.push_back(reinterpret_cast<PyTypeObject*>(type));
  }
  return true;
}

Owned array_of_numbers(const void* numbers, size_t nbytes) {
  const Owned bytes(
      PyBytes_FromStringAndSize(static_cast<const char*>(numbers), static_cast<Py_ssize_t>(nbytes)));
  return Owned(bytes == nullptr ? nullptr : array_of(bytes.get(), "Q"));
}

// (address and nbytes of each, device, entry of the first one's holder, state, cycle, entry of its place,
// places)
PyObject* answer_of(const Alikes::Group& group, const HeapGraph& graph, Entries& entries) {
  std::vector<uint64_t> numbers;
  std::unordered_set<Vertex> places;
  for (const Alikes::Member& member : group) {
    numbers.insert(numbers.end(), {member.address, member.nbytes});
    places.insert(member.place);
  }
  const Owned array = array_of_numbers(numbers.data(), numbers.size() * sizeof(uint64_t));
  const Alikes::Member& first = group.front();
  PyObject* cycle = array == nullptr ? nullptr : cycle_of(graph, first.holder, entries);
  if (cycle == nullptr) return nullptr;
  const Py_ssize_t holder = entries.number(first.holder);
  const Py_ssize_t place = entries.number(first.place);
  return Py_BuildValue("ONnsNnn", array.get(), device_name(first.device), holder, name_of(first.state), cycle,
                       place, static_cast<Py_ssize_t>(places.size()));
}

// find_storages(own, known=None, apart=(), indexed=())
PyObject* find_storages(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 1, 4, "find_storages(own, known=None, apart=(), indexed=())")) return nullptr;
  if (!PyUnicode_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "find_storages() takes the beginning of file names as a str");
    return nullptr;
  }
  const bool any_new = count > 1 && args[1] != Py_None;
  return guarded([&]() -> PyObject* {
    std::vector<Tally> known;
    std::vector<PyTypeObject*> apart;
    std::vector<PyTypeObject*> indexed{&PyList_Type, &PyTuple_Type, &PySet_Type, &PyFrozenSet_Type};
    if (any_new && !read_tally(args[1], known)) return nullptr;
    if (count > 2 && !read_types(args[2], apart)) return nullptr;
    if (count > 3 && !read_types(args[3], indexed)) return nullptr;
    const CollectionPause pause;
    HeapGraph graph(args[0]);
    if (!graph.walk()) return nullptr;
    struct New {
      Vertex holder;
      State state;
      c10::Device device;
      Tally tally;
    };
    std::vector<Tally> all;
    std::vector<New> found;
    States states(graph);
    for (Vertex vertex = 0; vertex < graph.size(); ++vertex) {
      if (graph.kind(vertex) != VertexKind::kStorage) continue;
      const State state = states.of(vertex);
      if (state == State::kOwn) continue;
      const auto& storage = *static_cast<const c10::StorageImpl*>(graph.object(vertex));
      DataFacts data;
      read_data_of(storage, data);
      if (data.pointer == nullptr) continue;  // no memory: meta, a wrapper's, released
      all.push_back({reinterpret_cast<uint64_t>(&storage), reinterpret_cast<uint64_t>(data.pointer),
                     nbytes_of(storage).value_or(0), state == State::kCycle});
      if (!any_new || has(known, all.back())) continue;
      found.push_back({holder_of(graph, vertex), state, data.device, all.back()});
    }
    Alikes alikes(graph, std::move(apart), std::move(indexed));
    for (const New& one : found) alikes.expect(one.holder);
    for (const New& one : found) alikes.add(one.holder, one.state, one.device, one.tally);
    Entries entries(graph);
    const Owned answers(PyList_New(0));
    if (answers == nullptr) return nullptr;
    for (const Alikes::Group& group : alikes.groups()) {
      if (!append(answers.get(), answer_of(group, graph, entries))) return nullptr;
    }
    const Owned crowded(PyList_New(0));
    for (const Vertex vertex : alikes.crowded()) {
      if (crowded == nullptr || !append(crowded.get(), PyLong_FromSsize_t(entries.number(vertex))))
        return nullptr;
    }
    const Owned tally = array_of_numbers(all.data(), all.size() * sizeof(Tally));
    if (tally == nullptr || crowded == nullptr || entries.failed()) return nullptr;
    return Py_BuildValue("OOOOO", tally.get(), entries.list(), answers.get(), crowded.get(),
                         graph.has_c_code_between() ? Py_True : Py_False);
  });
}

PyMethodDef functions[] = {
    {"find_holders", fast_call(find_holders), METH_FASTCALL,
     "find_holders(watched, own, closed=[], /)\n--\n\nAnswer who refers to some objects, impls, storages or "
     "nodes, "
     "given as "
     "(kind, address): entries (kind, object, address, name, how, parent) of what is on the ways from the "
     "roots; "
     "of each watched one (count, [(entry, how), ...], entries of unknown stacks, state, cycle); the number "
     "of "
     "busy nodes, and of vertices."},
    {"find_owners", fast_call(find_owners), METH_FASTCALL,
     "find_owners(kind, addresses, /)\n--\n\nAnswer who owns some impls or storages: of each the count and "
     "what "
     "each owner is to it, its Python object (\"object\"), another one (\"holder\"), or as C++ calls it "
     "(\"saved "
     "self\")."},
    {"find_storages", fast_call(find_storages), METH_FASTCALL,
     "find_storages(own, known=None, apart=(), indexed=(), /)\n--\n\nAnswer a tally of every storage with "
     "memory, four "
     "numbers each: address, pointer, nbytes, whether it is garbage. Where a tally is known, answer entries "
     "as "
     "find_holders() does, and the storages that it lacks, those together whose ways differ in indices "
     "alone, where "
     "they are many: (address and nbytes of each, device, entry of the first one's tensor's object, or of "
     "what else "
     "stands for it, state, cycle, entry of the first new tensor on the way, how many of these); the entries "
     "of "
     "dictionaries whose keys count as indices, as they lead to so many; and whether C code lies between "
     "frames, "
     "which may hold what it is making. Objects of the classes `apart` are never taken for one another, and "
     "garbage "
     "is not; those of `indexed` hold any number of equals, as lists do."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_holder_functions(PyObject* module) {
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace tensorplay::python
