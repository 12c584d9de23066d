// The driver's virtual memory, of which torch's expandable segments are made: addresses are reserved, and the card's
// memory is mapped to them piece by piece. Part of cudart.cpp.

struct Piece { size_t bytes; int device; };
std::map<uintptr_t, size_t> reserved_addresses;

static int device_attribute(int *value, int, int) { *value = 1; return 0; }  // of those that are asked: it can
static int granularity(size_t *bytes, const void *, int) { *bytes = DEVICE_PAGE; return 0; }
static int address_reserve(uintptr_t *address, size_t bytes, size_t, uintptr_t, unsigned long long) {
  LOCKED;
  void *found = mmap(nullptr, bytes + DEVICE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return OUT_OF_MEMORY;
  *address = rounded(uintptr_t(found), DEVICE_PAGE);
  reserved_addresses[*address] = bytes;
  return 0;
}
static int address_free(uintptr_t address, size_t bytes) {
  LOCKED;
  if (!reserved_addresses.erase(address)) return INVALID_VALUE;
  munmap((void *)address, bytes);
  return 0;
}
static int memory_create(Piece **piece, size_t bytes, const void *, unsigned long long) {
  LOCKED;
  wander();
  size_t &taken = used[current_device];
  if (taken + context_bytes + bytes > card_bytes) return OUT_OF_MEMORY;
  taken += bytes;
  peak[current_device] = std::max(peak[current_device], taken);
  ++allocations;
  *piece = new Piece{bytes, current_device};
  return 0;
}
static int memory_map(uintptr_t address, size_t bytes, size_t, Piece *piece, unsigned long long) {
  LOCKED;
  if (mprotect((void *)address, bytes, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
  memset((void *)address, 0xff, std::min(bytes, 4 * MIB));
  ranges[address] = {bytes, DEVICE, piece->device};
  return 0;
}
static int set_access(uintptr_t, size_t, const void *, size_t) { return 0; }
static int memory_unmap(uintptr_t address, size_t bytes) {  // torch unmaps one piece at a time, as it mapped them
  LOCKED;
  auto found = ranges.find(address);
  if (found == ranges.end() || found->second.bytes != bytes) return INVALID_VALUE;
  run_device(found->second.device);
  ranges.erase(found);
  mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return 0;
}
static int memory_release(Piece *piece) {
  LOCKED;
  used[piece->device] -= piece->bytes;
  delete piece;
  return 0;
}
static int not_simulated() { return NOT_SUPPORTED; }

// The driver's functions by name; those that nothing here asks for fail.
static void *driver_function(const std::string &name) {
  static const std::map<std::string, void *> known = {
      {"cuDeviceGetAttribute", (void *)device_attribute}, {"cuMemGetAllocationGranularity", (void *)granularity},
      {"cuMemAddressReserve", (void *)address_reserve},   {"cuMemAddressFree", (void *)address_free},
      {"cuMemCreate", (void *)memory_create},             {"cuMemMap", (void *)memory_map},
      {"cuMemSetAccess", (void *)set_access},             {"cuMemUnmap", (void *)memory_unmap},
      {"cuMemRelease", (void *)memory_release}};
  auto found = known.find(name);
  return found == known.end() ? (void *)not_simulated : found->second;
}
