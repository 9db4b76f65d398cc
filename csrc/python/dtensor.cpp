#include "dtensor.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <structmember.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "../compat.h"
#include "../core/dtensor.h"
#include "../core/read.h"
#include "../repair/apply.h"
#include "call.h"
#include "interpreter.h"
#include "record.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

struct Names {
  PyObject* local = PyUnicode_InternFromString("_local_tensor");
  PyObject* annotations = PyUnicode_InternFromString("__annotations__");
  PyObject* is_param = PyUnicode_InternFromString("_is_param");
  PyObject* dispatch = PyUnicode_InternFromString("__torch_dispatch__");
};

const Names& names() {
  static const Names known;
  return known;
}

PyObject* swap_function = nullptr;  // torch._C._swap_tensor_impl; null where this torch has none
PyObject* hooks_setter = nullptr;   // descriptors of torch.Tensor
PyObject* accumulate_setter = nullptr;
PyObject* no_dispatch = nullptr;  // what torch.Tensor has as __torch_dispatch__

// The first thing that `find` answers for the dictionary of a class, or of one that it derives from; null
// where nobody has it.
template <class Find>
PyObject* first_in_classes(PyTypeObject* type, Find find) {
  PyObject* order = type->tp_mro;
  for (Py_ssize_t i = 0; order != nullptr && i < PyTuple_GET_SIZE(order); ++i) {
    PyObject* dict = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(order, i))->tp_dict;
    if (PyObject* found = dict == nullptr ? nullptr : find(dict)) return found;
  }
  return nullptr;
}

// What a name is in the class; borrowed, null where nobody says.
PyObject* class_attribute(PyTypeObject* type, PyObject* name) {
  return first_in_classes(type, [&](PyObject* dict) { return item_of(dict, name); });
}

bool class_declares(PyTypeObject* type, PyObject* name) {
  const auto declared = [&](PyObject* dict) -> PyObject* {
    PyObject* annotations = item_of(dict, names().annotations);
    return annotations != nullptr && PyDict_Check(annotations) != 0 ? item_of(annotations, name) : nullptr;
  };
  return first_in_classes(type, declared) != nullptr;
}

bool is_slot(PyObject* attribute) {
  return attribute != nullptr && Py_IS_TYPE(attribute, &PyMemberDescr_Type);
}

// The value of a slot of an object's class, borrowed; null where it is not set.
PyObject* slot_value(PyObject* object, PyObject* attribute) {
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(attribute)->d_member;
  if (member->type != T_OBJECT_EX && member->type != T_OBJECT) return nullptr;
  PyObject* value = nullptr;
  std::memcpy(&value, reinterpret_cast<const char*>(object) + member->offset, sizeof(value));
  return value;
}

// Where a DTensor has its local tensor.
struct Local {
  bool is_dtensor = false;
  bool in_slot = false;
  bool is_own = false;        // in the object's own dictionary or slot, not its class's
  PyObject* value = nullptr;  // borrowed; null where there is none, or no tensor
};

Local find_local(PyObject* object) {
  Local found;
  PyTypeObject* type = Py_TYPE(object);
  // Any object may have an attribute of that name: only a class can answer from it.
  if (THPVariable_CheckTypeExact(type)) return found;
  PyObject* in_class = class_attribute(type, names().local);
  if (is_slot(in_class)) {
    found.is_dtensor = found.in_slot = found.is_own = true;
    found.value = slot_value(object, in_class);
  } else {
    PyObject* dict = dict_of(object);
    if (dict != nullptr) found.value = item_of(dict, names().local);
    found.is_own = found.value != nullptr;
    if (found.value == nullptr) found.value = in_class;
    found.is_dtensor = found.value != nullptr || class_declares(type, names().local);
  }
  if (found.value != nullptr && unpack_tensor(found.value) == nullptr) found.value = nullptr;
  return found;
}

bool is_parameter(PyObject* object) {
  if (PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(ParameterClass)) != 0) return true;
  PyObject* dict = dict_of(object);
  return dict != nullptr && item_of(dict, names().is_param) == Py_True;
}

// As check_has_torch_dispatch() of torch/csrc/utils/python_arg_parser.h asks, without running a metaclass.
bool class_dispatches(PyTypeObject* type) {
  PyObject* found = class_attribute(type, names().dispatch);
  return found != nullptr && found != no_dispatch;
}

bool has_entries(PyObject* hooks) {
  return hooks != nullptr && PyDict_Check(hooks) != 0 && PyDict_Size(hooks) > 0;
}

repair::ObjectFacts facts_of(PyObject* object, const Local& local) {
  const auto* variable = reinterpret_cast<const THPVariable*>(object);
  repair::ObjectFacts facts;
  facts.dispatches = class_dispatches(Py_TYPE(object));
  facts.in_slot = local.in_slot;
  facts.is_parameter = is_parameter(object);
  facts.local_is_own = local.is_own;
  facts.local_is_body = local.value == object;
  facts.local_is_dtensor = local.value != nullptr && find_local(local.value).is_dtensor;
  facts.slot_is_self = python_object(variable->cdata) == object;
  facts.has_hooks = has_entries(variable->backward_hooks);
  facts.has_accumulate_hooks = has_entries(variable->post_accumulate_grad_hooks);
  return facts;
}

// A DTensor, its local tensor, and both as tensors.
struct Pair {
  PyObject* object = nullptr;
  Local local;
  const at::Tensor* body = nullptr;
  const at::Tensor* inside = nullptr;
};

// False with an exception set for what has no local tensor.
bool read_pair(PyObject* object, Pair& pair) {
  pair.object = object;
  pair.body = need_tensor(object);
  if (pair.body == nullptr) return false;
  pair.local = find_local(object);
  if (pair.local.value == nullptr) {
    PyErr_Format(PyExc_ValueError, "a %.200s without a local tensor", Py_TYPE(object)->tp_name);
    return false;
  }
  pair.inside = unpack_tensor(pair.local.value);
  return true;
}

DtensorForm form_of_object(PyObject* object, const TensorFacts& body, const Local& local) {
  return form_of(body, class_dispatches(Py_TYPE(object)), local.in_slot, is_parameter(object));
}

PyObject* local_tensor(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = unpack_tensor(object);
    if (tensor == nullptr) return none();
    const Local found = find_local(object);
    if (!found.is_dtensor) return none();
    TensorFacts body;
    read_tensor(*tensor->unsafeGetTensorImpl(), body);
    const DtensorForm form = form_of_object(object, body, found);
    return Py_BuildValue("(NNO)", boolean(form.is_wrapper), boolean(form.has_key),
                         found.value == nullptr ? Py_None : found.value);
  });
}

// What `.data` of torch.Tensor answers for a dense tensor, made without the dispatcher and gone after the
// call.
PyObject* data_alias(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    const c10::TensorImpl& impl = *tensor->unsafeGetTensorImpl();
    TensorFacts facts;
    read_tensor(impl, facts);
    const bool dense = facts.kind == Kind::kStrided || facts.kind == Kind::kMeta;
    // Python's own key would have the class's operators make it.
    if (!dense || facts.impl.is_inference || facts.impl.keys.has(c10::DispatchKey::Python)) return none();
    const c10::impl::ExcludeDispatchKeyGuard without_modes(c10::DispatchKey::Python);
    const at::Tensor alias(impl.shallow_copy_and_detach(c10::VariableVersion(0), false));
    return make_record(alias, nullptr, 0);
  });
}

PyObject* own_value(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 2, 2, "own_value(object, name)")) return nullptr;
  if (PyUnicode_CheckExact(args[1]) == 0) {
    PyErr_SetString(PyExc_TypeError, "own_value() takes a name");
    return nullptr;
  }
  PyObject* found = nullptr;
  if (PyObject* dict = dict_of(args[0])) found = item_of(dict, args[1]);
  if (found == nullptr) {
    PyObject* in_class = class_attribute(Py_TYPE(args[0]), args[1]);
    if (is_slot(in_class)) found = slot_value(args[0], in_class);
  }
  return Py_NewRef(found == nullptr ? Py_None : found);
}

// All that says how operators and questions for the geometry reach a tensor.
PyObject* dispatch_form(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    const c10::TensorImpl& impl = *tensor->unsafeGetTensorImpl();
    return Py_BuildValue(
        "(KNNNN)", static_cast<unsigned long long>(repair::without_backends(impl.key_set()).raw_repr()),
        boolean(compat::custom_strides(impl)), boolean(compat::custom_sizes(impl)),
        boolean(compat::PolicyMirror::has_device(impl)), boolean(compat::PolicyMirror::has_layout(impl)));
  });
}

PyObject* state_names(const std::vector<DtensorState>& states) {
  PyObject* answer = PyTuple_New(static_cast<Py_ssize_t>(states.size()));
  for (size_t i = 0; answer != nullptr && i < states.size(); ++i) {
    PyObject* name = interned(name_of(states[i]));
    if (name == nullptr) {
      Py_CLEAR(answer);
    } else {
      PyTuple_SET_ITEM(answer, static_cast<Py_ssize_t>(i), name);
    }
  }
  return answer;
}

PyObject* dtensor_states(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    Pair pair;
    if (!read_pair(object, pair)) return nullptr;
    TensorFacts body;
    TensorFacts local;
    read_tensor(*pair.body->unsafeGetTensorImpl(), body);
    read_tensor(*pair.inside->unsafeGetTensorImpl(), local);
    if (is_fake(pair.local.value)) local.kind = Kind::kFake;
    return state_names(relate(body, local, form_of_object(object, body, pair.local)));
  });
}

// Bits of what is to be moved along, as repairs.py has them.
constexpr long kHooks = 1;
constexpr long kGrad = 2;
constexpr long kVersion = 4;

// (requires_grad or None, bits), as arguments 1 and 2. False with an exception set.
bool read_request(PyObject* const* args, repair::Request& request) {
  if (args[1] != Py_None) request.requires_grad = args[1] == Py_True;
  const long moves = PyLong_AsLong(args[2]);
  if (moves == -1 && PyErr_Occurred() != nullptr) return false;
  request.migrate_hooks = (moves & kHooks) != 0;
  request.migrate_grad = (moves & kGrad) != 0;
  request.migrate_version = (moves & kVersion) != 0;
  return true;
}

repair::Plan plan_of(const Pair& pair, const repair::Request& request) {
  return repair::make_plan(*pair.body->unsafeGetTensorImpl(), *pair.inside->unsafeGetTensorImpl(),
                           facts_of(pair.object, pair.local), request);
}

const char* name_of_result(repair::Result result) {
  switch (result) {
    case repair::Result::kPassed:
      return "passed";
    case repair::Result::kRefused:
      return "refused";
    case repair::Result::kReported:
      return "reported";
    default:
      return "not checked";
  }
}

// Of a check that holds only the name counts: one tuple for all of them. New reference, or null with an
// exception.
PyObject* passed_entry(const char* name) {
  static std::unordered_map<const char*, PyObject*> known;  // kept for good; names are literals
  PyObject*& entry = known[name];
  if (entry == nullptr) entry = Py_BuildValue("(NNN)", interned(name), interned("passed"), interned(""));
  return Py_XNewRef(entry);
}

PyObject* plan_repair(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 4, 4, "plan_repair(tensor, requires_grad, moves, whole)")) return nullptr;
  return guarded([&]() -> PyObject* {
    Pair pair;
    if (!read_pair(args[0], pair)) return nullptr;
    repair::Request request;
    if (!read_request(args, request)) return nullptr;
    request.whole = args[3] == Py_True;
    const repair::Plan plan = plan_of(pair, request);
    PyObject* checks = PyList_New(0);
    for (size_t i = 0; checks != nullptr && i < plan.checks.size(); ++i) {
      const repair::Check& check = plan.checks[i];
      PyObject* entry = check.result == repair::Result::kPassed
                            ? passed_entry(check.name)
                            : Py_BuildValue("(NNN)", interned(check.name),
                                            interned(name_of_result(check.result)), text(check.found));
      if (entry == nullptr || PyList_Append(checks, entry) != 0) Py_CLEAR(checks);
      Py_XDECREF(entry);
    }
    if (checks == nullptr) return nullptr;
    return Py_BuildValue("(NNN)", state_names(plan.states), boolean(plan.is_needed), checks);
  });
}

// What Python code has said about torch functions counts for nobody while it lives: setters go to torch's
// own.
class WithoutTorchFunction {
 public:
  WithoutTorchFunction() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~WithoutTorchFunction() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  WithoutTorchFunction(const WithoutTorchFunction&) = delete;
  WithoutTorchFunction& operator=(const WithoutTorchFunction&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_;
};

// Sets a field of torch.Tensor anew to what it is: the setter then attaches it to the impl.
bool attach(PyObject* object, PyObject* setter, PyObject* value) {
  if (value == nullptr) return true;
  const Owned kept(Py_NewRef(value));
  const WithoutTorchFunction guard;
  return Py_TYPE(setter)->tp_descr_set(setter, object, value) == 0;
}

// Takes the current exception away, and answers what it says.
std::string take_error_text() {
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Owned kind(type);
  const Owned error(value);
  const Owned where(trace);
  const Owned said(value == nullptr ? nullptr : PyObject_Str(value));
  const char* found = said == nullptr ? nullptr : PyUnicode_AsUTF8(said.get());
  if (found == nullptr) PyErr_Clear();
  return found == nullptr ? "" : found;
}

class ObjectHands final : public repair::Hands {
 public:
  // `registrations`: a tuple of (dict, key) or (list, index) that hold the object.
  ObjectHands(PyObject* object, PyObject* donor, PyObject* registrations)
      : object_(object),
        donor_(donor),
        registrations_(registrations),
        type_(Py_TYPE(object)),
        dict_(dict_of(object)),
        content_(dict_ == nullptr ? nullptr : PyDict_Copy(dict_)),
        fields_(fields()) {}

  bool exchange() override {
    const Owned answer(PyObject_CallFunctionObjArgs(swap_function, object_, donor_, nullptr));
    if (answer != nullptr) return true;
    refusal_ = take_error_text();
    return false;
  }

  // Why the exchange was refused, in PyTorch's words; empty where it was not.
  const std::string& refusal() const { return refusal_; }

  bool attach_hooks() override {
    auto* variable = reinterpret_cast<THPVariable*>(object_);
    const bool attached = attach(object_, hooks_setter, variable->backward_hooks) &&
                          attach(object_, accumulate_setter, variable->post_accumulate_grad_hooks);
    if (!attached) PyErr_Clear();
    return attached;
  }

  const at::Tensor& body() const override { return THPVariable_Unpack(object_); }
  const at::Tensor& other() const override { return THPVariable_Unpack(donor_); }

  bool is_same_object() const override {
    return Py_TYPE(object_) == type_ && dict_of(object_) == dict_ && has_same_content() &&
           fields() == fields_ && python_object(body()) == object_ && python_object(other()) == donor_ &&
           is_registered();
  }

 private:
  // What a class adds to torch.Tensor's own object: slots, the weak references.
  std::vector<char> fields() const {
    const auto* begin = reinterpret_cast<const char*>(object_);
    return {begin + sizeof(THPVariable), begin + Py_TYPE(object_)->tp_basicsize};
  }

  bool has_same_content() const {
    if (dict_ == nullptr) return true;
    if (content_ == nullptr || PyDict_GET_SIZE(dict_) != PyDict_GET_SIZE(content_.get())) return false;
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(content_.get(), &position, &key, &value) != 0) {
      if (PyUnicode_CheckExact(key) != 0 && item_of(dict_, key) != value) return false;
    }
    return true;
  }

  bool is_registered() const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(registrations_); ++i) {
      PyObject* place = PyTuple_GET_ITEM(registrations_, i);
      PyObject* container = PyTuple_GET_ITEM(place, 0);
      PyObject* key = PyTuple_GET_ITEM(place, 1);
      PyObject* held = nullptr;
      if (PyDict_Check(container) != 0) {
        held = item_of(container, key);
      } else if (PyList_Check(container) != 0) {
        const Py_ssize_t index = PyLong_AsSsize_t(key);
        if (index >= 0 && index < PyList_GET_SIZE(container)) held = PyList_GET_ITEM(container, index);
      }
      if (held != object_) return false;
    }
    return true;
  }

  PyObject* object_;
  PyObject* donor_;
  PyObject* registrations_;
  PyTypeObject* type_;
  PyObject* dict_;
  Owned content_;
  std::vector<char> fields_;
  std::string refusal_;
};

bool need_registrations(PyObject* places) {
  bool valid = PyTuple_Check(places) != 0;
  for (Py_ssize_t i = 0; valid && i < PyTuple_GET_SIZE(places); ++i) {
    PyObject* place = PyTuple_GET_ITEM(places, i);
    valid = PyTuple_Check(place) != 0 && PyTuple_GET_SIZE(place) == 2;
    PyObject* key = valid ? PyTuple_GET_ITEM(place, 1) : nullptr;
    valid = valid && (PyUnicode_CheckExact(key) != 0 || PyLong_CheckExact(key) != 0);
  }
  if (!valid) PyErr_SetString(PyExc_TypeError, "registrations: a tuple of (dict, name) or (list, index)");
  return valid;
}

PyObject* apply_repair(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const char* call = "apply_repair(tensor, requires_grad, moves, registrations, journal, trip='')";
  if (!need_arguments(count, 5, 6, call) || !need_registrations(args[3])) return nullptr;
  if (PyList_Check(args[4]) == 0) {
    PyErr_SetString(PyExc_TypeError, "journal: a list");
    return nullptr;
  }
  const char* trip = count > 5 ? PyUnicode_AsUTF8(args[5]) : "";
  if (trip == nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    Pair pair;
    if (!read_pair(args[0], pair)) return nullptr;
    repair::Request request;
    if (!read_request(args, request)) return nullptr;
    const repair::Plan plan = plan_of(pair, request);
    if (plan.is_refused() || !plan.is_needed || swap_function == nullptr) {
      return Py_BuildValue("(sss)", "refused", "plan", "");
    }
    const bool requires_grad = request.requires_grad.value_or(pair.body->requires_grad());
    const Owned donor(THPVariable_Wrap(repair::make_donor(*pair.inside, requires_grad)));
    if (donor == nullptr) return nullptr;
    const at::Tensor& alias = THPVariable_Unpack(donor.get());
    const char* wrong = Py_IS_TYPE(donor.get(), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0
                            ? repair::wrong_with_donor(alias, *pair.inside, requires_grad)
                            : "donor-exact";
    if (std::string_view(trip).starts_with("donor")) wrong = trip;
    if (wrong != nullptr) return Py_BuildValue("(sss)", "refused", "donor", wrong);
    // Before anything is done: whoever is interrupted right after it can take it back.
    if (PyList_Append(args[4], donor.get()) != 0) return nullptr;
    ObjectHands hands(args[0], donor.get(), args[3]);
    const repair::Outcome outcome = repair::apply(hands, *pair.inside, request, trip);
    if (outcome.end == repair::End::kDone) return Py_BuildValue("(sss)", "done", "", "");
    if (outcome.end == repair::End::kStuck) {
      PyErr_Format(PyExc_RuntimeError,
                   "%s did not hold after the exchange, and it could not be exchanged back", outcome.check);
      return nullptr;
    }
    const char* end = outcome.end == repair::End::kRefused ? "refused" : "taken back";
    return Py_BuildValue("(ssN)", end, outcome.check, text(hands.refusal()));
  });
}

// All in one call, within which no signal's handler runs.
PyObject* undo_repairs(PyObject*, PyObject* done) {
  if (PyList_Check(done) == 0) {
    PyErr_SetString(PyExc_TypeError,
                    "undo_repairs() takes a list of (tensor, donor, address of the old impl)");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const Owned nowhere(PyTuple_New(0));
    if (nowhere == nullptr) return nullptr;
    bool all = true;
    for (Py_ssize_t i = PyList_GET_SIZE(done); i-- > 0;) {
      PyObject* tensor = nullptr;
      PyObject* donor = nullptr;
      unsigned long long before = 0;
      if (PyArg_ParseTuple(PyList_GET_ITEM(done, i), "OOK", &tensor, &donor, &before) == 0) return nullptr;
      const at::Tensor* held = need_tensor(donor);
      if (need_tensor(tensor) == nullptr || held == nullptr) return nullptr;
      if (reinterpret_cast<uint64_t>(held->unsafeGetTensorImpl()) != before)
        continue;  // nothing was exchanged
      ObjectHands hands(tensor, donor, nowhere.get());
      all = hands.exchange() && all;
    }
    return boolean(all);
  });
}

PyObject* repair_checks(PyObject*, PyObject*) {
  PyObject* answer = PyList_New(0);
  for (const char* const* name = repair::checks_after(); answer != nullptr && *name != nullptr; ++name) {
    PyObject* entry = interned(*name);
    if (entry == nullptr || PyList_Append(answer, entry) != 0) Py_CLEAR(answer);
    Py_XDECREF(entry);
  }
  return answer;
}

PyMethodDef methods[] = {
    {"local_tensor", local_tensor, METH_O,
     "local_tensor(object, /)\n--\n\nAnswer, of a DTensor of any library, whether its body is a wrapper "
     "without "
     "memory, whether operators reach its class by the Python key, and the local tensor or None. None for "
     "anything "
     "else. Runs no property."},
    {"data_alias", data_alias, METH_O,
     "data_alias(tensor, /)\n--\n\nRead what `.data` of a dense tensor is: an impl over the same storage, "
     "with a "
     "version counter of its own. None for other kinds."},
    {"own_value", fast_call(own_value), METH_FASTCALL,
     "own_value(object, name, /)\n--\n\nAnswer what an object has under a name in its own dictionary or in a "
     "slot "
     "of its class, or None. Runs no property."},
    {"dtensor_states", dtensor_states, METH_O,
     "dtensor_states(tensor, /)\n--\n\nName the states of a DTensor's body beside its local tensor, the "
     "worst "
     "first. ValueError where it has none."},
    {"dispatch_form", dispatch_form, METH_O,
     "dispatch_form(tensor, /)\n--\n\nAnswer the dispatch keys without what names a backend, and whether "
     "strides, "
     "sizes, device and layout are asked of somebody else than the impl."},
    {"plan_repair", fast_call(plan_repair), METH_FASTCALL,
     "plan_repair(tensor, requires_grad, moves, whole, /)\n--\n\nAnswer the states, whether an exchange "
     "would mend "
     "one, and each check: (name, passed, refused, reported or not checked; what was read). `moves`: 1 for "
     "hooks, 2 "
     "for the gradient, 4 for the version counter. Changes nothing."},
    {"apply_repair", fast_call(apply_repair), METH_FASTCALL,
     "apply_repair(tensor, requires_grad, moves, registrations, journal, trip='', /)\n--\n\nExchange the "
     "body for an "
     "alias of the local tensor, verify, and take it back where a check does not hold. Answer (done, refused "
     "or taken "
     "back; the check; what was said of it). The object that gets the old body is put into the list "
     "`journal` first. "
     "`trip` names a check to fail."},
    {"undo_repairs", undo_repairs, METH_O,
     "undo_repairs(done, /)\n--\n\nExchange back what apply_repair() exchanged: (tensor, donor, "
     "address of the "
     "old impl) of each. Answer whether all could be."},
    {"repair_checks", repair_checks, METH_NOARGS,
     "repair_checks()\n--\n\nName the checks that follow an exchange, in their order."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* attribute_of(PyObject* owner, const char* name) {
  PyObject* found = PyObject_GetAttrString(owner, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

}  // namespace

bool add_dtensor_functions(PyObject* module) {
  const Owned torch_c(PyImport_ImportModule("torch._C"));
  if (torch_c == nullptr) return false;
  swap_function = attribute_of(torch_c.get(), "_swap_tensor_impl");
  const Owned base(PyObject_GetAttrString(torch_c.get(), "TensorBase"));
  if (base == nullptr) return false;
  hooks_setter = PyObject_GetAttrString(base.get(), "_backward_hooks");
  accumulate_setter = PyObject_GetAttrString(base.get(), "_post_accumulate_grad_hooks");
  no_dispatch = PyObject_GetAttrString(reinterpret_cast<PyObject*>(THPVariableClass), "__torch_dispatch__");
  if (hooks_setter == nullptr || accumulate_setter == nullptr || no_dispatch == nullptr) return false;
  const Owned known(boolean(swap_function != nullptr));
  std::vector<DtensorState> all;
  for (size_t i = 0; i <= static_cast<size_t>(DtensorState::kEmpty); ++i) {
    all.push_back(static_cast<DtensorState>(i));
  }
  const Owned states(state_names(all));
  if (states == nullptr || PyModule_AddObjectRef(module, "DTENSOR_STATES", states.get()) != 0) return false;
  return known != nullptr && PyModule_AddObjectRef(module, "KNOWS_EXCHANGE", known.get()) == 0 &&
         PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
