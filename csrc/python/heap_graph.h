// Everything that is alive and who refers to it: one graph over Python's objects and the C++ objects of
// tensors.
//
// Vertices are Python objects, TensorImpl, StorageImpl, autograd nodes, executing frames and threads; an edge
// is one strong reference. So a count of references is the number of edges that end in its object, and what
// is missing is held by C or C++ code that nobody can name. Reads with the collector's own tp_traverse, and
// beyond it where that stops: into C++, arrays and executing frames. Runs no code of the user, changes no
// count, holds nothing: all addresses are valid as long as nothing else runs. Needs the GIL throughout.
#pragma once

#include <Python.h>

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../core/table.h"
#include "interpreter.h"

namespace tensorplay::python {

enum class VertexKind : uint8_t { kObject, kTensor, kStorage, kNode, kFrame, kThread, kModules, kUnknown };

// A vertex's number.
using Vertex = uint32_t;
constexpr Vertex kNoVertex = UINT32_MAX;

// How one vertex refers to another.
struct Label {
  enum class Kind : uint8_t { kKey, kNth, kIsKey };
  uint64_t bits = 0;

  static Label of_key(PyObject* key) { return {reinterpret_cast<uint64_t>(key)}; }
  static Label of_nth(uint64_t nth, Kind kind = Kind::kNth) {
    return {nth << 2 | static_cast<uint64_t>(kind)};
  }
  Kind kind() const { return static_cast<Kind>(bits & 3); }
  PyObject* key() const { return reinterpret_cast<PyObject*>(bits); }  // kKey: of a dict, borrowed
  uint64_t nth() const { return bits >> 2; }  // of a list or tuple the index, else of what is visited
};

struct Reference {
  Vertex from;
  Vertex to;
  Label label;
};

class HeapGraph {
 public:
  // Frames of code whose file begins with `own` are the observer's: what they hold is looked at last, and
  // counts as held by nobody else. Null: no frame is.
  explicit HeapGraph(PyObject* own);
  ~HeapGraph();
  HeapGraph(const HeapGraph&) = delete;
  HeapGraph& operator=(const HeapGraph&) = delete;

  // Before walk(): every reference to this object will be kept.
  Vertex watch(VertexKind kind, const void* object);

  // Before walk(): nothing is reached through this object.
  void close(const void* object) { closed_.insert(object); }

  // False with an exception set.
  bool walk();

  // -- after walk() --

  VertexKind kind(Vertex vertex) const { return static_cast<VertexKind>(keys_[vertex] & 7); }
  const void* object(Vertex vertex) const {
    return reinterpret_cast<const void*>(keys_[vertex] & ~uint64_t{7});
  }
  size_t size() const { return keys_.size(); }

  // The last step of a shortest path from a root; a root's is from kNoVertex.
  Vertex parent(Vertex vertex) const { return parents_[vertex] >= kRoot ? kNoVertex : parents_[vertex]; }
  Label label(Vertex vertex) const { return labels_[vertex]; }
  // Whether it hangs on nothing but references among such objects: garbage that is not collected yet.
  bool is_garbage(Vertex vertex) const { return parents_[vertex] == kIsland; }
  bool is_reached(Vertex vertex) const { return parents_[vertex] != kUnreached && !is_garbage(vertex); }
  // Whether the shortest path to it begins in the observer's own frames.
  bool is_own(Vertex vertex) const;

  // Of all watched vertices; the same pair as often as it refers.
  std::span<const Reference> references() const { return references_; }
  // The strong count of a vertex that has one.
  uint64_t count(Vertex vertex) const;
  // The Python object that stands for a tensor, storage or node; null for others.
  const void* python_object_of(Vertex vertex) const;
  // Of an object: how many entries of evaluation stacks whose extent is not known name it; some may be stale.
  size_t on_unknown_stacks(Vertex vertex) const;

  // A shortest cycle of garbage that keeps a vertex alive, and the way from it to the vertex, as references.
  // Both are empty where there is none.
  struct Cycle {
    std::vector<Reference> around;
    std::vector<Reference> way;
  };
  Cycle cycle_above(Vertex vertex) const;

  // What C++ calls a reference: "saved self", "grad_fn"; empty for those of Python objects.
  std::string link_text(Vertex from, Label label) const;

  const FrameReferences& frame(Vertex vertex) const { return frames_[number_of(vertex)]; }
  unsigned long thread_of_frame(Vertex vertex) const { return frame_threads_[number_of(vertex)]; }
  unsigned long thread(Vertex vertex) const { return thread_ids_[number_of(vertex)]; }
  const std::vector<ThreadReference>& thread_references(Vertex vertex) const {
    return thread_references_[number_of(vertex)];
  }
  // Whether C code lies between frames of some thread, so that it may hold what it is making just now.
  bool has_c_code_between() const { return c_code_between_; }
  // Nodes that another thread held: what they saved is not among the edges.
  size_t busy_nodes() const { return busy_; }

 private:
  friend class EdgeVisitor;
  class Classes;
  static constexpr Vertex kUnreached = UINT32_MAX;
  static constexpr Vertex kIsland = UINT32_MAX - 1;
  static constexpr Vertex kRoot = UINT32_MAX - 2;

  struct Slot {
    uint64_t key;  // 0: free
    Vertex vertex;
  };
  struct Pending {
    uint64_t key;
    Label label;
    Vertex from;
  };
  static constexpr size_t kAhead = 16;
  static constexpr size_t kExpandAhead = 6;
  static constexpr size_t kMostTried = 100;
  static constexpr uint64_t kOwnObject = 1 << 20;  // label of what C++ keeps alive in Python

  size_t number_of(Vertex vertex) const { return keys_[vertex] >> 3; }
  static uint64_t key_of(VertexKind kind, const void* object) {
    return reinterpret_cast<uint64_t>(object) | static_cast<uint64_t>(kind);
  }
  size_t slot_of(uint64_t key) const { return key * uint64_t{0x9E3779B97F4A7C15} >> (64 - bits_); }
  void grow(size_t vertices);
  Vertex vertex_of(uint64_t key);

  void refer(Vertex from, Label label, PyObject* object);
  void refer(Vertex from, Label label, VertexKind kind, const void* object);
  void look_up_later(Vertex from, Label label, uint64_t key);
  void arrive(const Pending& pending);
  void finish_pending();
  Vertex add_root(VertexKind kind, uint64_t number);
  void ask_ahead() const;
  void walk_from_here();
  void expand(Vertex vertex);
  void expand_object(Vertex vertex, PyObject* object);
  void expand_tensor(Vertex vertex, PyObject* object);
  void expand_node_object(Vertex vertex, PyObject* object);
  std::span<PyObject* const> children_of(PyObject* object);
  template <class Owner>
  void refer_to_python(Vertex vertex, const Owner& owner);
  void expand_array(Vertex vertex, PyObject* object);
  void expand_capsule(Vertex vertex, PyObject* capsule);
  void traverse(Vertex vertex, PyObject* object);
  void expand_modules(Vertex vertex);
  bool starts_with_own(PyObject* text) const;
  bool is_executing(PyObject* object) const;
  void traverse_executing(Vertex vertex, PyObject* generator, const FrameReferences& frame);
  Vertex keeper_of(Vertex vertex) const;
  void read_threads();
  void find_islands(std::span<PyObject* const> objects);
  void sort_island_references();
  std::span<const Reference> references_from(Vertex vertex) const;
  void find_cyclic() const;
  // Whether it is between a tensor, storage or node and the Python object that stands for it.
  bool is_within_one(const Reference& reference) const;

  PyObject* own_;
  Classes* classes_ = nullptr;  // while it walks
  int bits_ = 0;
  Table<Slot> slots_;
  std::vector<uint64_t> keys_;
  std::vector<Vertex> parents_;
  std::vector<Label> labels_;
  std::vector<Vertex> queue_;
  size_t expanded_ = 0;
  size_t watched_ = 0;
  std::vector<Reference> references_;

  Pending coming_[kAhead];
  size_t coming_begin_ = 0;
  size_t coming_end_ = 0;
  Pending looked_up_[kAhead];
  size_t looked_up_begin_ = 0;
  size_t looked_up_end_ = 0;

  bool in_islands_ = false;
  std::vector<Reference> island_references_;
  // Of garbage, made when a cycle is asked for: who refers to each, and what may lie on a cycle.
  mutable std::unordered_map<Vertex, std::vector<Reference>> above_;
  mutable std::unordered_set<Vertex> cyclic_;

  std::vector<FrameReferences> frames_;
  std::vector<unsigned long> frame_threads_;
  std::vector<unsigned long> thread_ids_;
  std::vector<std::vector<ThreadReference>> thread_references_;
  std::unordered_set<const void*> closed_;
  std::vector<PyObject*> visited_;  // by one object's tp_traverse
  size_t busy_ = 0;
  bool c_code_between_ = false;
  std::unordered_map<const void*, size_t> generators_;  // those that execute, and their frames
};

}  // namespace tensorplay::python
