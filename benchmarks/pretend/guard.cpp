// torch's CPU build has nothing that switches between CUDA devices, and refuses them for that alone: this does nothing.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
using Guard = NoOpDeviceGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace c10::impl
