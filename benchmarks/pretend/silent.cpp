// A CUDA device whose operators cost the host what a launch would: their numbers lie in CPU memory and are worked on by
// the CPU, and a clock adds up how long that takes, so that a measurement can leave it out.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>

namespace c10::impl {
using Guard = NoOpDeviceGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace c10::impl

namespace {
using Seconds = std::chrono::duration<double>;
double worked = 0;

const c10::Device GPU(c10::DeviceType::CUDA, 0), CPU(c10::DeviceType::CPU);

// The same memory under the other device's name; it lives as long as either does.
at::Tensor renamed(const at::Tensor& x, c10::Device device) {
  c10::DispatchKey key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  const c10::Storage& from = x.storage();
  auto* kept = new c10::Storage(from);
  c10::DataPtr memory(from.mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), from.nbytes(), std::move(memory), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
  return made;
}

at::Tensor on_cpu(const at::Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  return x.numel() == 0 ? at::empty(x.sizes(), x.options().device(CPU)) : renamed(x, CPU);  // some are for results
}

// What the CPU wrote lies where `x` does, but for results of which it chose the shape.
void take_over(const at::Tensor& x, const at::Tensor& written) {
  if (x.sizes() == written.sizes()) return;
  at::Tensor made = renamed(written, GPU);
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  x.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
}

c10::IValue on_cpu(const c10::IValue& value) {
  if (value.isTensor()) return on_cpu(value.toTensor());
  if (value.isDevice()) return CPU;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector()) list.push_back(on_cpu(x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) list.push_back(x ? std::optional(on_cpu(*x)) : x);
    return list;
  }
  return value;
}

c10::IValue on_gpu(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? renamed(value.toTensor(), GPU) : value.toTensor();
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& x : value.toTensorVector()) list.push_back(renamed(x, GPU));
    return list;
  }
  return value;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n_args = schema.arguments().size(), first = stack->size() - n_args;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  bool was_far = false;
  for (size_t i = 0; i < n_args; i++) {
    (*stack)[first + i] = on_cpu(given[i]);
    was_far |= (given[i].isTensor() && given[i].toTensor().defined() && given[i].toTensor().is_cuda()) ||
               given[i].isTensorList() || (given[i].isDevice() && given[i].toDevice().is_cuda());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    auto began = std::chrono::steady_clock::now();
    op.callBoxed(stack);
    worked += Seconds(std::chrono::steady_clock::now() - began).count();
  }
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); i++) {
    c10::IValue& out = (*stack)[first + i];
    const auto* alias = returns[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (size_t j = 0; j < n_args; j++) {
        const auto* of = schema.arguments()[j].alias_info();
        if (of != nullptr && of->beforeSets() == alias->beforeSets()) {
          if (given[j].isTensor()) take_over(given[j].toTensor(), out.toTensor());
          out = given[j];
        }
      }
    } else if (was_far) {
      out = on_gpu(out);
    }
  }
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  auto began = std::chrono::steady_clock::now();
  on_cpu(self).copy_(on_cpu(source));
  worked += Seconds(std::chrono::steady_clock::now() - began).count();
  return self;
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  auto type = dtype.value_or(at::kFloat);
  auto began = std::chrono::steady_clock::now();
  at::Tensor made = at::detail::empty_strided_cpu(size, stride, type);
  made.zero_();
  worked += Seconds(std::chrono::steady_clock::now() - began).count();
  return renamed(made, GPU);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat>) {
  std::vector<int64_t> stride(size.size(), 1);
  for (int64_t i = static_cast<int64_t>(size.size()) - 2; i >= 0; i--) stride[i] = stride[i + 1] * std::max<int64_t>(size[i + 1], 1);
  return empty_strided(size, stride, dtype, layout, device, pinned);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("alias", &at::native::alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}
}  // namespace

extern "C" double worked_so_far() { return worked; }
