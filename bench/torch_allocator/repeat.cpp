// Repeat the allocations on standard input with torch's own caching allocator; print its statistics.
//   a NUMBER BYTES STREAM   allocate        f NUMBER   free
// With an argument, statistics are printed after each line: allocated, its peak, reserved, its peak, retries.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <c10/util/Exception.h>

#include <cstdio>
#include <unordered_map>

namespace allocator = c10::cuda::CUDACachingAllocator;

static void print_statistics() {
  auto of = allocator::getDeviceStats(0);
  printf("%lld %lld %lld %lld %lld\n", (long long)of.allocated_bytes[0].current, (long long)of.allocated_bytes[0].peak,
         (long long)of.reserved_bytes[0].current, (long long)of.reserved_bytes[0].peak, (long long)of.num_alloc_retries);
}

int main(int argc, char**) {
  const bool prints_all = argc > 1;
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  std::unordered_map<long, void*> in_use;
  char action;
  long number, num_bytes, stream;
  while (scanf(" %c %ld", &action, &number) == 2) {
    if (action == 'f') {
      allocator::raw_delete(in_use[number]);
    } else if (scanf("%ld %ld", &num_bytes, &stream) == 2) {
      try {
        in_use[number] = allocator::raw_alloc_with_stream(num_bytes, reinterpret_cast<cudaStream_t>(stream));
      } catch (const c10::Error&) {
        print_statistics();
        puts("out of memory");
        return 0;
      }
    }
    if (prints_all) print_statistics();
  }
  if (!prints_all) print_statistics();
}
