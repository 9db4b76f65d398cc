#include "track.h"

#include <algorithm>
#include <string>
#include <vector>

#include "../track/forward.h"
#include "../track/ops.h"
#include "../track/process.h"
#include "../track/stacks.h"
#include "call.h"
#include "interpreter.h"
#include "values.h"

namespace tensorplay::python {
namespace {

using track::Block;
using track::Ledger;
using track::OriginTotals;

// Calls with the ledger. Without the GIL: a thread that reads it may be waiting for that.
template <class Use>
auto read_ledger(Use use) {
  const WithoutGil released;
  return track::process_recorder().with_ledger(use);
}

bool put(PyObject* dict, const char* name, uint64_t value) {
  const Owned number(PyLong_FromUnsignedLongLong(value));
  return number != nullptr && PyDict_SetItemString(dict, name, number.get()) == 0;
}

PyObject* track_start(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "track_start(stacks, depth)")) return nullptr;
  const long depth = PyLong_AsLong(args[1]);
  if (depth == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!track::start_watching({args[0] == Py_True, static_cast<int>(depth)})) {
      PyErr_SetString(
          PyExc_RuntimeError,
          "the CPU allocator of this process cannot be followed: its pointers are not their own contexts");
      return nullptr;
    }
    return none();
  });
}

PyObject* track_stop(PyObject*, PyObject*) {
  {
    const WithoutGil released;
    track::stop_watching();
  }
  return none();
}

PyObject* track_is_on(PyObject*, PyObject*) {
  return boolean(track::is_watching());
}

PyObject* track_totals(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto [totals, lifetimes, reuse] = read_ledger([](const Ledger& ledger) {
      return std::tuple(ledger.totals(), ledger.lifetimes(), ledger.reuse(track::monotonic_nanoseconds()));
    });
    const track::Losses losses = track::process_recorder().losses();
    Owned dict(PyDict_New());
    if (dict == nullptr) return nullptr;
    const std::pair<const char*, uint64_t> fields[] = {
        {"allocs", totals.allocs},
        {"alloc_bytes", totals.alloc_bytes},
        {"frees", totals.frees},
        {"freed_bytes", totals.freed_bytes},
        {"frees_of_older", totals.frees_of_older},
        {"frees_missed", totals.frees_missed},
        {"blocks_missed", totals.blocks_missed},
        {"origins_missed", totals.origins_missed},
        {"live_blocks", totals.live_blocks},
        {"live_bytes", totals.live_bytes},
        {"peak_bytes", totals.peak_bytes},
        {"peak_time", totals.peak_time},
        {"tensors", totals.tensors},
        {"tensors_reusing", totals.tensors_reusing},
        {"writes", totals.writes},
        {"copies", totals.copies},
        {"copied_bytes", totals.copied_bytes},
        {"copying", totals.copying},
        {"recent_tensors", reuse.tensors},
        {"recent_reusing", reuse.reusing},
        {"lost_full", losses.full},
        {"lost_crowded", losses.crowded},
        {"lost_ended", losses.ended},
        {"sites", track::known_sites().size()},
        {"sites_missed", track::known_sites().missed()},
        {"nbytes", track::process_recorder().nbytes()},
        {"now", track::monotonic_nanoseconds()},
    };
    for (const auto& [name, value] : fields) {
      if (!put(dict.get(), name, value)) return nullptr;
    }
    PyObject* buckets = PyList_New(0);
    for (size_t i = 0; buckets != nullptr && i < lifetimes.blocks.size(); ++i) {
      const Owned row(Py_BuildValue("(KK)", static_cast<unsigned long long>(lifetimes.blocks[i]),
                                    static_cast<unsigned long long>(lifetimes.nbytes[i])));
      if (row == nullptr || PyList_Append(buckets, row.get()) != 0) Py_CLEAR(buckets);
    }
    const Owned kept(buckets);
    if (kept == nullptr || PyDict_SetItemString(dict.get(), "lifetimes", kept.get()) != 0) return nullptr;
    return dict.release();
  });
}

PyObject* row_of(const OriginTotals& one) {
  return Py_BuildValue(
      "(NIKKKKKKKKKKKKK)", text(track::op_name(one.origin.op)), one.origin.site,
      static_cast<unsigned long long>(one.allocs), static_cast<unsigned long long>(one.alloc_bytes),
      static_cast<unsigned long long>(one.frees), static_cast<unsigned long long>(one.freed_bytes),
      static_cast<unsigned long long>(one.live_blocks), static_cast<unsigned long long>(one.live_bytes),
      static_cast<unsigned long long>(one.at_peak), static_cast<unsigned long long>(one.tensors),
      static_cast<unsigned long long>(one.writes), static_cast<unsigned long long>(one.copies),
      static_cast<unsigned long long>(one.copied_bytes), static_cast<unsigned long long>(one.copying),
      static_cast<unsigned long long>(one.longest_copy));
}

PyObject* track_origins(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const std::vector<OriginTotals> all = read_ledger([](const Ledger& ledger) { return ledger.origins(); });
    PyObject* answer = PyList_New(0);
    for (size_t i = 0; answer != nullptr && i < all.size(); ++i) {
      const Owned row(row_of(all[i]));
      if (row == nullptr || PyList_Append(answer, row.get()) != 0) Py_CLEAR(answer);
    }
    return answer;
  });
}

PyObject* track_stack(PyObject*, PyObject* number) {
  const unsigned long site = PyLong_AsUnsignedLong(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    PyObject* answer = PyList_New(0);
    for (const track::FrameName& frame :
         track::frames_of(static_cast<uint32_t>(site) & ~track::kInBackward)) {
      if (answer == nullptr) break;
      const Owned row(Py_BuildValue("(NNi)", text(frame.file), text(frame.function), frame.line));
      if (row == nullptr || PyList_Append(answer, row.get()) != 0) Py_CLEAR(answer);
    }
    return answer;
  });
}

PyObject* block_row(uint64_t address, const Block& block) {
  return Py_BuildValue("(KKKKNIKINII)", static_cast<unsigned long long>(address),
                       static_cast<unsigned long long>(block.nbytes),
                       static_cast<unsigned long long>(block.born),
                       static_cast<unsigned long long>(block.number), text(track::op_name(block.origin.op)),
                       block.origin.site, static_cast<unsigned long long>(block.written), block.writes,
                       text(track::op_name(block.writer.op)), block.writer.site, block.tensors);
}

PyObject* track_block(PyObject*, PyObject* number) {
  const unsigned long long address = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    const auto [found, block] = read_ledger([&](const Ledger& ledger) {
      const Block* at = ledger.block_at(address);
      return std::pair(at != nullptr, at == nullptr ? Block{} : *at);
    });
    return found ? block_row(address, block) : none();
  });
}

PyObject* track_blocks(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 1, 1, "track_blocks(most)")) return nullptr;
  const Py_ssize_t most = PyLong_AsSsize_t(args[0]);
  if (most == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    auto all = read_ledger([](const Ledger& ledger) {
      std::vector<std::pair<uint64_t, Block>> blocks;
      ledger.each_block([&](uint64_t address, const Block& block) { blocks.emplace_back(address, block); });
      return blocks;
    });
    // The largest first, the older one of two.
    std::ranges::sort(all, [](const auto& a, const auto& b) {
      return a.second.nbytes != b.second.nbytes ? a.second.nbytes > b.second.nbytes
                                                : a.second.number < b.second.number;
    });
    PyObject* answer = PyList_New(0);
    for (size_t i = 0;
         answer != nullptr && i < all.size() && i < static_cast<size_t>(std::max<Py_ssize_t>(most, 0)); ++i) {
      const Owned row(block_row(all[i].first, all[i].second));
      if (row == nullptr || PyList_Append(answer, row.get()) != 0) Py_CLEAR(answer);
    }
    return answer;
  });
}

PyMethodDef methods[] = {
    {"track_start", fast_call(track_start), METH_FASTCALL,
     "track_start(stacks, depth, /)\n--\n\nFollow what the CPU allocator and operators do from now on, and "
     "forget "
     "what was followed before. `depth`: how many frames of a stack."},
    {"track_stop", track_stop, METH_NOARGS,
     "track_stop()\n--\n\nFollow no more. What was followed stays readable."},
    {"track_is_on", track_is_on, METH_NOARGS, "track_is_on()\n--\n\nTell whether anything is followed."},
    {"track_totals", track_totals, METH_NOARGS,
     "track_totals()\n--\n\nAnswer what was followed in figures, by name; times in nanoseconds of the "
     "monotonic "
     "clock. lifetimes[i]: blocks and bytes that lived from two to the i nanoseconds to twice that."},
    {"track_origins", track_origins, METH_NOARGS,
     "track_origins()\n--\n\nAnswer the same for each operator and stack: (operator, stack, allocations, "
     "bytes, "
     "frees, freed bytes, live blocks, live bytes, live bytes at the peak, tensors, writes, copies, copied "
     "bytes, "
     "nanoseconds of copying, of the longest copy)."},
    {"track_stack", track_stack, METH_O,
     "track_stack(number, /)\n--\n\nAnswer the frames of a stack, innermost first: (file, function, line)."},
    {"track_block", track_block, METH_O,
     "track_block(address, /)\n--\n\nAnswer what is known of the block at an address, or None: (address, "
     "bytes, when "
     "it came, its number, operator, stack, last write, writes, operator and stack of the last write, "
     "tensors over "
     "it)."},
    {"track_blocks", fast_call(track_blocks), METH_FASTCALL,
     "track_blocks(most, /)\n--\n\nAnswer the blocks that are alive, the largest first, in the form of "
     "track_block()."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_track_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
