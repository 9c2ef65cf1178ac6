// NVIDIA's NCCL, opened when a rank first asks for it.
#include <dlfcn.h>

#include "parallel/nccl_api.h"

namespace strata {
namespace {

struct Library {
  NcclApi api;
  std::string why_not;

  Library() {
    void* const handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);  // never closed: it keeps threads
    if (!handle) {
      why_not = dlerror();
      return;
    }
    const auto find = [&](const char* name) {
      void* const function = dlsym(handle, name);
      if (!function && why_not.empty()) {
        why_not = std::string("libnccl.so.2 is older than 2.14: it has no ") + name;
      }
      return function;
    };
#define STRATA_NCCL_FUNCTION(name) api.name = reinterpret_cast<decltype(api.name)>(find("nccl" #name));
    STRATA_NCCL_FUNCTIONS(STRATA_NCCL_FUNCTION)
#undef STRATA_NCCL_FUNCTION
  }
};

}  // namespace

const NcclApi* FindNccl(std::string* why_not) {
  static const Library library;
  *why_not = library.why_not;
  return library.why_not.empty() ? &library.api : nullptr;
}

}  // namespace strata
