// Whether a tensor that another thread may be letting go of is one still.
//
// Note [Gradients on their way out]
// PyTorch destroys a gradient while `.grad` still points to it: the pointer is cleared when the destructor
// has returned, and on its way out that waits for the GIL. A probe that holds the GIL meanwhile meets the
// pointer for certain, and the memory behind it is free. So where other threads may run, it is proven first
// that a tensor is there: its memory can be read, and what it begins with is the table of a class of tensors.
#pragma once

#include <c10/core/TensorImpl.h>

namespace tensorplay {

// For one call, which holds the GIL throughout: whether other threads may let go of tensors meanwhile.
void expect_other_threads(bool expected);

// True without a proof where no other threads are expected. With one it costs two system calls, 2
// microseconds; once in a call 20 more.
bool is_still_tensor(const c10::TensorImpl* impl);

}  // namespace tensorplay
