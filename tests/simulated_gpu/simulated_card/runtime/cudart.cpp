// A CUDA runtime whose devices are memory of this process, under torch's own CUDA build.
//
// Streams are queues of copies, waits and records; the schedule decides how late they run: at once, as late as events
// allow, or anywhere between, from a seed. Kernels are run by Python over the same bytes, at once, after all that their
// stream has been asked before. What happens is written to a log, from which races are found whatever the schedule.
#include <driver_types.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t MIB = size_t(1) << 20;
constexpr size_t PAGE = 4096, DEVICE_PAGE = 2 * MIB;
constexpr int OUT_OF_MEMORY = 2, INVALID_VALUE = 1, NOT_READY = 600, NOT_SUPPORTED = 801, CAPTURE_FORBIDS = 900,
              CAPTURE_SPOILT = 901, CAPTURE_MERGED = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
              CAPTURE_ISOLATED = 905;

// What the log says; races.py reads it.
enum Happening { RECORD = 1, WAIT = 2, STREAM_SYNC = 4, EVENT_SYNC = 5, READ = 10, WRITE = 11, COPY = 12 };
enum CopyKind { BESIDE = 0, STAGED = 1, BLOCKING = 2 };  // of the host: never waits; reads first; waits for the end
struct Entry { int happening, stream, event, way; uintptr_t source, target; size_t bytes; };
constexpr int HOST = -1;

struct Stream;
struct Moment { double milliseconds = 0; };
struct Graph;
struct Event {
  int id;
  bool recorded = false;
  Stream *stream = nullptr;
  uint64_t ticket = 0;
  int asked = 0;
  int graph = -1;  // number of the graph that was captured meanwhile
  int mark = 0;    // in that graph
  std::shared_ptr<Moment> moment = std::make_shared<Moment>();
};
struct Task {
  enum Kind { COPYING, FILLING, WAITING, RECORDING, CALLING, KERNEL, MARKING, AWAITING } kind;  // the last three: in graphs
  void *target = nullptr;
  const void *source = nullptr;
  size_t bytes = 0;
  int value = 0;                                    // of a filling; the number of a captured kernel or of a mark
  int way = BESIDE;
  Stream *other = nullptr;                          // that is waited for, up to this ticket
  uint64_t until = 0;
  std::shared_ptr<Moment> moment = nullptr;
  void (*call)(void *) = nullptr;
  void *argument = nullptr;
  uint64_t ticket = 0;
  int branch = 0;  // of a graph
};
using Clock = std::map<int, uint64_t>;  // by branch: how much of its work comes before
struct Graph {
  int id;
  std::vector<Task> tasks = {};
  bool spoilt = false;
  std::vector<Stream *> branches = {};  // the streams that were captured, the one where it began first
  std::vector<Clock> clocks = {};       // of the branches
  std::vector<Clock> marks = {};        // events, at the place where each was recorded
  std::vector<void *> handles = {};     // of an executable: streams of its own for all branches but the first
};
struct Stream {
  int id;
  int device;
  std::deque<Task> queue;
  uint64_t done = 0, asked = 0;
  Graph *capturing = nullptr;
};

enum Type { PINNED = 1, DEVICE = 2 };
struct Range { size_t bytes; Type type; int device; };

enum Schedule { EAGER, LAZY, RANDOM };

constexpr int DEVICES = 2;  // of the same size
thread_local int current_device = 0;

std::recursive_mutex mutex;
std::map<std::pair<int, void *>, Stream *> streams;  // by their device and handle: each device has one without
std::map<uintptr_t, Range> ranges;
std::vector<Entry> entries;
bool logging = false;
int schedule = EAGER, next_stream = 1, next_event = 1, next_graph = 1, last_error = 0;
std::mt19937_64 chance;
size_t card_bytes = size_t(4) << 30, context_bytes = 300 * MIB;
size_t used[DEVICES] = {}, peak[DEVICES] = {}, pinned = 0, pinned_peak = 0, pinnable = SIZE_MAX;
long unsimulated = 0, allocations = 0, replays = 0;
std::map<const void *, std::string> kernels;
std::map<std::string, long> launched;
int (*run_captured)(int number, void *stream) = nullptr;

int failed(int error) { return error ? last_error = error : 0; }
int spoils(Graph *capture, int error = CAPTURE_FORBIDS) { capture->spoilt = true; return failed(error); }

void note(Happening what, int stream, int event = 0, uintptr_t source = 0, uintptr_t target = 0, size_t bytes = 0,
          int way = BESIDE) {
  if (logging) entries.push_back({what, stream, event, way, source, target, bytes});
}

std::map<void *, int> devices_of_streams;

Stream *stream_of(void *handle) {
  const int device = handle ? devices_of_streams.emplace(handle, current_device).first->second : current_device;
  Stream *&stream = streams[{device, handle}];
  if (!stream) stream = new Stream{handle || device ? next_stream++ : 0, device};
  return stream;
}

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run_until(Stream *stream, uint64_t ticket);

void run(Stream *stream, const Task &task) {
  switch (task.kind) {
    case Task::COPYING: memmove(task.target, task.source, task.bytes); break;
    case Task::FILLING: memset(task.target, task.value, task.bytes); break;
    case Task::WAITING: if (task.other != stream) run_until(task.other, task.until); break;
    case Task::RECORDING: task.moment->milliseconds = now(); break;
    case Task::CALLING: task.call(task.argument); break;
    case Task::KERNEL: case Task::MARKING: case Task::AWAITING: break;  // only in graphs, which cudaGraphLaunch runs
  }
}

void run_until(Stream *stream, uint64_t ticket) {
  while (!stream->queue.empty() && stream->queue.front().ticket <= ticket) {
    const Task task = stream->queue.front();
    stream->queue.pop_front();
    run(stream, task);
    stream->done = task.ticket;
  }
  stream->done = std::max(stream->done, ticket);
}

void run_all(Stream *stream) { run_until(stream, stream->asked); }
void run_everything() { for (auto &known : streams) run_all(known.second); }
void run_device(int device) {  // and the host knows it
  for (auto &known : streams) if (known.second->device == device && known.second->asked) {
    run_all(known.second);
    note(STREAM_SYNC, known.second->id);
  }
}

// In a random schedule any stream may get on at any call.
void wander() {
  if (schedule != RANDOM || streams.empty() || chance() % 2) return;
  auto chosen = std::next(streams.begin(), chance() % streams.size());
  Stream *stream = chosen->second;
  if (!stream->queue.empty()) run_until(stream, stream->queue[chance() % stream->queue.size()].ticket);
}

int branch_of(Graph *graph, Stream *stream) {
  auto found = std::find(graph->branches.begin(), graph->branches.end(), stream);
  if (found != graph->branches.end()) return found - graph->branches.begin();
  graph->branches.push_back(stream);
  graph->clocks.emplace_back();
  return graph->branches.size() - 1;
}

void capture(Stream *stream, Task task) {
  Graph *graph = stream->capturing;
  task.branch = branch_of(graph, stream);
  if (task.kind != Task::MARKING && task.kind != Task::AWAITING) ++graph->clocks[task.branch][task.branch];
  graph->tasks.push_back(task);
}

void ask(Stream *stream, Task task) {
  if (stream->capturing) return capture(stream, task);
  wander();
  task.ticket = ++stream->asked;
  stream->queue.push_back(task);
  if (schedule == EAGER) run_until(stream, task.ticket);
}

const Range *range_of(const void *address) {
  auto found = ranges.upper_bound(uintptr_t(address));
  if (found == ranges.begin()) return nullptr;
  --found;
  return uintptr_t(address) < found->first + found->second.bytes ? &found->second : nullptr;
}

void *mapped(size_t bytes, Type type) {
  void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  ranges[uintptr_t(address)] = {bytes, type, current_device};
  return address;
}

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The graph of that number, while it is captured.
Graph *open_graph(int number) {
  for (auto &known : streams)
    if (Graph *graph = known.second->capturing) if (graph->id == number) return graph;
  return nullptr;
}

// True if the first branch comes after the work of all others.
bool is_joined(const Graph *graph) {
  for (size_t branch = 1; branch < graph->branches.size(); ++branch) {
    auto of = [&](const Clock &clock) { auto found = clock.find(branch); return found == clock.end() ? 0 : found->second; };
    if (of(graph->clocks[branch]) > of(graph->clocks[0])) return false;
  }
  return true;
}

void log_copy(int stream, const Task &task) {
  note(COPY, stream, 0, uintptr_t(task.source), uintptr_t(task.target), task.bytes, task.way);
}

}  // namespace

#define LOCKED std::lock_guard<std::recursive_mutex> guard(mutex)

extern "C" {

// ---- what the tests ask

void sim_card(size_t bytes, size_t context) { LOCKED; card_bytes = bytes; context_bytes = context; }
void sim_schedule(int kind, uint64_t seed) { LOCKED; run_everything(); schedule = kind; chance.seed(seed); }
void sim_log(int on) { LOCKED; logging = on; entries.clear(); }
size_t sim_log_size() { LOCKED; return entries.size(); }
void sim_log_read(Entry *out) { LOCKED; std::copy(entries.begin(), entries.end(), out); }
size_t sim_used(int device) { LOCKED; return used[device]; }
size_t sim_peak(int device) { LOCKED; return peak[device]; }
size_t sim_pinned() { LOCKED; return pinned; }
void sim_pinnable(size_t bytes) { LOCKED; pinnable = bytes; }
size_t sim_pinned_peak() { LOCKED; return pinned_peak; }
void sim_reset_peaks() { LOCKED; std::copy(used, used + DEVICES, peak); pinned_peak = pinned; }
long sim_allocations() { LOCKED; return allocations; }
long sim_unsimulated() { LOCKED; return unsimulated; }
void sim_print_unsimulated() { LOCKED; for (auto &one : launched) fprintf(stderr, "%6ld %.160s\n", one.second, one.first.c_str()); }

// Before a kernel of Python's: what its stream has been asked is done. A launch tells of an error that nobody asked for.
int sim_kernel(void *handle) { LOCKED; wander(); run_all(stream_of(handle)); return std::exchange(last_error, 0); }
void sim_access(void *handle, uintptr_t address, size_t bytes, int writes) {
  LOCKED;
  note(writes ? WRITE : READ, stream_of(handle)->id, 0, address, address, bytes);
}
// Of the host; only pinned memory is touched by streams too.
void sim_host_access(uintptr_t address, size_t bytes, int writes) {
  LOCKED;
  const Range *range = range_of((void *)address);
  if (range && range->type == PINNED) note(writes ? WRITE : READ, HOST, 0, address, address, bytes);
}
int sim_capturing(void *handle) { LOCKED; return stream_of(handle)->capturing != nullptr; }
void sim_capture_kernel(void *handle, int number) {
  LOCKED;
  Task task{Task::KERNEL};
  task.value = number;
  capture(stream_of(handle), task);
}
void sim_on_replay(int (*call)(int, void *)) { LOCKED; run_captured = call; }
long sim_replays() { LOCKED; return replays; }

// ---- the device

int cudaGetDeviceCount(int *count) { *count = DEVICES; return 0; }
int cudaGetDevice(int *device) { *device = current_device; return 0; }
int cudaSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return failed(101);
  current_device = device;
  return 0;
}
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  LOCKED;
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Simulated GPU");
  p->totalGlobalMem = card_bytes;
  p->major = 8; p->minor = 6;
  p->multiProcessorCount = 20; p->warpSize = 32;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 1536;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 101376; p->sharedMemPerMultiprocessor = 102400;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 4 << 20; p->textureAlignment = 512;
  p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1; p->asyncEngineCount = 2;
  return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMultiProcessorCount, 20}, {cudaDevAttrMaxThreadsPerMultiProcessor, 1536},
      {cudaDevAttrComputeCapabilityMajor, 8}, {cudaDevAttrComputeCapabilityMinor, 6},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 102400}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 101376}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return 0;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { if (least) *least = 0; if (greatest) *greatest = -5; return 0; }
int cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return 0; }
int cudaDeviceGetPCIBusId(char *text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device + 1); return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) {
  LOCKED;
  *total = card_bytes;
  *free = card_bytes - std::min(card_bytes, used[current_device] + context_bytes);
  return 0;
}
int cudaGetLastError() { LOCKED; return std::exchange(last_error, 0); }
int cudaPeekAtLastError() { LOCKED; return last_error; }
const char *cudaGetErrorString(int error) {
  switch (error) {
    case 0: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case CAPTURE_FORBIDS: return "operation not permitted when stream is capturing";
    case CAPTURE_SPOILT: return "operation failed due to a previous error during capture";
    case CAPTURE_MERGED: return "operation would result in a merge of separate capture sequences";
    case CAPTURE_UNMATCHED: return "capture was not ended in the same stream as it began";
    case CAPTURE_UNJOINED: return "capturing stream has unjoined work";
    case CAPTURE_ISOLATED: return "dependency created on uncaptured work in another stream";
    default: return "an error of the simulated CUDA runtime";
  }
}
const char *cudaGetErrorName(int error) {
  return error == 0 ? "cudaSuccess" : error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

// ---- memory

int cudaMalloc(void **address, size_t bytes) {
  LOCKED;
  wander();
  const size_t taken = rounded(bytes, DEVICE_PAGE);
  *address = nullptr;
  if (used[current_device] + context_bytes + taken > card_bytes) return failed(OUT_OF_MEMORY);
  *address = mapped(taken, DEVICE);
  if (!*address) return failed(OUT_OF_MEMORY);
  memset(*address, 0xff, std::min(bytes, 4 * MIB));  // not a number: what is read before it is written shows
  used[current_device] += taken;
  peak[current_device] = std::max(peak[current_device], used[current_device]);
  ++allocations;
  return 0;
}
int cudaFree(void *address) {
  LOCKED;
  if (!address) return 0;
  auto found = ranges.find(uintptr_t(address));
  if (found == ranges.end()) return failed(INVALID_VALUE);
  run_device(found->second.device);
  used[found->second.device] -= found->second.bytes;
  munmap(address, found->second.bytes);
  ranges.erase(found);
  return 0;
}
#include "virtual_memory.h"

int cudaMallocAsync(void **address, size_t bytes, void *) { return cudaMalloc(address, bytes); }
int cudaFreeAsync(void *address, void *) { return cudaFree(address); }
int cudaHostAlloc(void **address, size_t bytes, unsigned) {
  LOCKED;
  const size_t taken = rounded(bytes, PAGE);
  *address = mapped(taken, PINNED);
  if (!*address) return failed(OUT_OF_MEMORY);
  memset(*address, 0xff, std::min(bytes, 4 * MIB));
  pinned += taken;
  pinned_peak = std::max(pinned_peak, pinned);
  return 0;
}
int cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
int cudaFreeHost(void *address) {
  LOCKED;
  run_everything();  // nothing is ordered by it
  auto found = ranges.find(uintptr_t(address));
  if (found == ranges.end()) return failed(INVALID_VALUE);
  pinned -= found->second.bytes;
  munmap(address, found->second.bytes);
  ranges.erase(found);
  return 0;
}
int cudaHostRegister(void *address, size_t bytes, unsigned) {
  LOCKED;
  if (pinned + bytes > pinnable) return failed(OUT_OF_MEMORY);
  ranges[uintptr_t(address)] = {bytes, PINNED, current_device};
  pinned += bytes;
  pinned_peak = std::max(pinned_peak, pinned);
  return 0;
}
int cudaHostUnregister(void *address) {
  LOCKED;
  auto found = ranges.find(uintptr_t(address));
  if (found == ranges.end()) return failed(INVALID_VALUE);
  note(WRITE, HOST, 0, uintptr_t(address), uintptr_t(address), found->second.bytes);  // whoever copies now reads others' pages
  run_everything();  // nothing is ordered by it
  pinned -= found->second.bytes;
  ranges.erase(found);
  return 0;
}
int cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  LOCKED;
  memset(attributes, 0, sizeof *attributes);
  const Range *range = range_of(address);
  attributes->device = range ? range->device : -2;
  attributes->type = !range ? cudaMemoryTypeUnregistered
                     : range->type == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  (range && range->type == DEVICE ? attributes->devicePointer : attributes->hostPointer) = range ? (void *)address : nullptr;
  return 0;
}
int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int, void *handle) {
  LOCKED;
  Stream *stream = stream_of(handle);
  Task task{Task::COPYING, target, source, bytes};
  if (stream->capturing) {
    if (!range_of(source) || !range_of(target)) return failed(CAPTURE_FORBIDS);
  } else if (!range_of(source)) {  // pageable: the call returns when it has been read
    task.way = STAGED;
    log_copy(stream->id, task);
    void *staging = malloc(bytes);
    memcpy(staging, source, bytes);
    task.source = staging;
    ask(stream, task);
    Task release{Task::CALLING};
    release.call = free;
    release.argument = staging;
    ask(stream, release);
    return 0;
  }
  task.way = range_of(target) ? BESIDE : BLOCKING;
  if (!stream->capturing) log_copy(stream->id, task);
  ask(stream, task);
  if (task.way == BLOCKING) run_all(stream);
  return 0;
}
int cudaMemcpy(void *target, const void *source, size_t bytes, int) {
  LOCKED;
  Stream *stream = stream_of(nullptr);
  Task task{Task::COPYING, target, source, bytes};
  task.way = BLOCKING;
  log_copy(stream->id, task);
  ask(stream, task);
  run_all(stream);
  return 0;
}
int cudaMemcpyPeerAsync(void *target, int, const void *source, int, size_t bytes, void *handle) {
  return cudaMemcpyAsync(target, source, bytes, 0, handle);
}
int cudaMemsetAsync(void *target, int value, size_t bytes, void *handle) {
  LOCKED;
  Stream *stream = stream_of(handle);
  Task task{Task::FILLING, target, nullptr, bytes, value};
  if (!stream->capturing) note(WRITE, stream->id, 0, uintptr_t(target), uintptr_t(target), bytes);
  ask(stream, task);
  return 0;
}
int cudaMemset(void *target, int value, size_t bytes) { return cudaMemsetAsync(target, value, bytes, nullptr); }

// ---- streams and events

int cudaStreamCreateWithPriority(void **handle, unsigned, int) { LOCKED; *handle = malloc(64); stream_of(*handle); return 0; }
int cudaStreamCreateWithFlags(void **handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
int cudaStreamCreate(void **handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
int cudaStreamDestroy(void *handle) { LOCKED; run_all(stream_of(handle)); return 0; }
int cudaStreamSynchronize(void *handle) {
  LOCKED;
  Stream *stream = stream_of(handle);
  if (stream->capturing) return spoils(stream->capturing);
  run_all(stream);
  note(STREAM_SYNC, stream->id);
  return 0;
}
int cudaDeviceSynchronize() {
  LOCKED;
  for (auto &known : streams)
    if (known.second->capturing && known.second->device == current_device) return spoils(known.second->capturing);
  run_device(current_device);
  return 0;
}
int cudaStreamQuery(void *handle) {
  LOCKED;
  wander();
  Stream *stream = stream_of(handle);
  if (!stream->queue.empty()) return NOT_READY;
  note(STREAM_SYNC, stream->id);
  return 0;
}
int cudaStreamGetPriority(void *, int *priority) { *priority = 0; return 0; }
int cudaStreamWaitEvent(void *handle, Event *event, unsigned) {
  LOCKED;
  Stream *stream = stream_of(handle);
  if (Graph *graph = open_graph(event->graph)) {  // the capture goes on in this stream too
    if (stream->capturing && stream->capturing != graph) return spoils(graph, CAPTURE_MERGED);
    stream->capturing = graph;
    const int branch = branch_of(graph, stream);
    for (auto &[other, work] : graph->marks[event->mark]) {
      uint64_t &before = graph->clocks[branch][other];
      before = std::max(before, work);
    }
    Task task{Task::AWAITING};
    task.value = event->mark;
    capture(stream, task);
    return 0;
  }
  if (!event->recorded) return 0;
  if (stream->capturing) return spoils(stream->capturing, CAPTURE_ISOLATED);
  note(WAIT, stream->id, event->id);
  Task task{Task::WAITING};
  task.other = event->stream;
  task.until = event->ticket;
  ask(stream, task);
  return 0;
}
int cudaEventCreateWithFlags(Event **event, unsigned) { LOCKED; *event = new Event{next_event++}; return 0; }
int cudaEventCreate(Event **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventDestroy(Event *event) { LOCKED; delete event; return 0; }
int cudaEventRecord(Event *event, void *handle) {
  LOCKED;
  Stream *stream = stream_of(handle);
  event->graph = stream->capturing ? stream->capturing->id : -1;
  if (Graph *graph = stream->capturing) {
    Task task{Task::MARKING};
    task.value = event->mark = graph->marks.size();
    graph->marks.push_back(graph->clocks[branch_of(graph, stream)]);
    capture(stream, task);
    return 0;
  }
  event->stream = stream;
  event->recorded = true;
  event->asked = 0;
  event->moment = std::make_shared<Moment>();
  note(RECORD, stream->id, event->id);
  Task task{Task::RECORDING};
  task.moment = event->moment;
  event->ticket = stream->asked + 1;
  ask(stream, task);
  return 0;
}
int cudaEventRecordWithFlags(Event *event, void *handle, unsigned) { return cudaEventRecord(event, handle); }
int cudaEventSynchronize(Event *event) {
  LOCKED;
  if (open_graph(event->graph)) return failed(CAPTURE_FORBIDS);
  if (!event->recorded) return 0;
  run_until(event->stream, event->ticket);
  note(EVENT_SYNC, HOST, event->id);
  return 0;
}
int cudaEventQuery(Event *event) {
  LOCKED;
  wander();
  if (!event->recorded) return 0;
  if (++event->asked > 1000) run_until(event->stream, event->ticket);  // who polls gets an answer in the end
  if (event->stream->done < event->ticket) return NOT_READY;
  note(EVENT_SYNC, HOST, event->id);
  return 0;
}
int cudaEventElapsedTime(float *milliseconds, Event *start, Event *end) {
  LOCKED;
  for (Event *event : {start, end}) if (event->recorded) run_until(event->stream, event->ticket);
  *milliseconds = float(std::max(1e-3, end->moment->milliseconds - start->moment->milliseconds));
  return 0;
}
int cudaLaunchHostFunc(void *handle, void (*call)(void *), void *argument) {
  LOCKED;
  Task task{Task::CALLING};
  task.call = call;
  task.argument = argument;
  ask(stream_of(handle), task);
  return 0;
}

// ---- stream capture: the requests of streams become a list. A launch asks a stream of its own for each stream that was
// captured, and orders them by the events that were recorded and waited for

int cudaStreamBeginCapture(void *handle, int) {
  LOCKED;
  Stream *stream = stream_of(handle);
  if (stream->capturing) return failed(CAPTURE_FORBIDS);
  stream->capturing = new Graph{next_graph++};
  branch_of(stream->capturing, stream);
  return 0;
}
int cudaStreamEndCapture(void *handle, Graph **graph) {
  LOCKED;
  Stream *stream = stream_of(handle);
  *graph = nullptr;
  if (!stream->capturing) return failed(INVALID_VALUE);
  if (stream->capturing->branches[0] != stream) return spoils(stream->capturing, CAPTURE_UNMATCHED);
  *graph = stream->capturing;
  for (auto &known : streams) if (known.second->capturing == *graph) known.second->capturing = nullptr;
  const int error = (*graph)->spoilt ? CAPTURE_SPOILT : is_joined(*graph) ? 0 : CAPTURE_UNJOINED;
  if (!error) return 0;
  delete *graph;
  *graph = nullptr;
  return failed(error);
}
int cudaStreamIsCapturing(void *handle, int *status) { LOCKED; *status = stream_of(handle)->capturing ? 1 : 0; return 0; }
int cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, Graph **graph, const void **dependencies,
                             const void **edges, size_t *count) {
  LOCKED;
  Graph *capturing = stream_of(handle)->capturing;
  *status = capturing ? 1 : 0;
  if (id) *id = capturing ? capturing->id : 0;
  if (graph) *graph = capturing;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return 0;
}
int cudaThreadExchangeStreamCaptureMode(int *) { return 0; }
int cudaGraphGetNodes(Graph *graph, void **, size_t *count) { LOCKED; *count = graph->tasks.size(); return 0; }
int cudaGraphInstantiateWithFlags(Graph **executable, Graph *graph, unsigned long long) {
  *executable = new Graph(*graph);
  for (size_t branch = 0; branch < graph->branches.size(); ++branch) (*executable)->handles.push_back(malloc(64));
  return 0;
}
int cudaGraphDestroy(Graph *graph) { delete graph; return 0; }
int cudaGraphExecDestroy(Graph *executable) { delete executable; return 0; }
int cudaGraphLaunch(Graph *executable, void *handle) {
  struct Recorded { int event; Stream *stream; uint64_t ticket; };
  std::vector<Recorded> recorded(executable->marks.size());
  { LOCKED; ++replays; }
  for (const Task &task : executable->tasks) {
    void *branch = task.branch ? executable->handles[task.branch] : handle;
    if (task.kind == Task::KERNEL) {  // in Python, which another thread may hold that waits for this lock
      if (int error = run_captured(task.value, branch)) return failed(error);
      continue;
    }
    LOCKED;
    Stream *stream = stream_of(branch);
    Task next = task;
    if (task.kind == Task::COPYING) log_copy(stream->id, task);
    if (task.kind == Task::FILLING) note(WRITE, stream->id, 0, uintptr_t(task.target), uintptr_t(task.target), task.bytes);
    if (task.kind == Task::MARKING) {
      recorded[task.value] = {next_event++, stream, stream->asked + 1};
      note(RECORD, stream->id, recorded[task.value].event);
      next.kind = Task::RECORDING;
      next.moment = std::make_shared<Moment>();
    } else if (task.kind == Task::AWAITING) {
      const Recorded &mark = recorded[task.value];
      note(WAIT, stream->id, mark.event);
      next.kind = Task::WAITING;
      next.other = mark.stream;
      next.until = mark.ticket;
    }
    ask(stream, next);
  }
  return 0;
}

// ---- kernels of torch's own are registered and never run; that one was asked for is counted

void **__cudaRegisterFatBinary(void *) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *handle, char *, const char *name, int, void *, void *, void *, void *, int *) {
  LOCKED;
  kernels[handle] = name;
}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
int __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *(void **)stream = nullptr;
  return 0;
}
int __cudaGetKernel(void **kernel, const void *handle) { *kernel = (void *)handle; return 0; }
static int launch(const void *handle) {
  LOCKED;
  ++unsimulated;
  auto found = kernels.find(handle);
  ++launched[found == kernels.end() ? "a kernel without a name" : found->second];
  return 0;
}
int __cudaLaunchKernel(const void *handle, dim3, dim3, void **, size_t, void *) { return launch(handle); }
int cudaLaunchKernel(const void *handle, dim3, dim3, void **, size_t, void *) { return launch(handle); }
int cudaLaunchKernelExC(const void *, const void *handle, void **) { return launch(handle); }
int cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 86;
  return 0;
}
int cudaFuncSetAttribute(const void *, int, int) { return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) { *blocks = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t, unsigned) { *blocks = 2; return 0; }
int cudaGetSymbolAddress(void **address, const void *) { static char room[1 << 16]; *address = room; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long, int *found) {
  *function = driver_function(name);
  if (found) *found = 0;
  return 0;
}

// ---- what torch names and nothing here calls
#define MISSING(name) int name() { fprintf(stderr, "the simulated CUDA runtime has no " #name "\n"); return failed(NOT_SUPPORTED); }
int __cudaInitModule() { return NOT_SUPPORTED; }
MISSING(cudaDeviceEnablePeerAccess)
MISSING(cudaDeviceGetDefaultMemPool)
MISSING(cudaGraphAddNode)
MISSING(cudaGraphConditionalHandleCreate)
MISSING(cudaGraphDebugDotPrint)
MISSING(cudaGraphNodeGetDependencies)
MISSING(cudaIpcCloseMemHandle)
MISSING(cudaIpcGetEventHandle)
MISSING(cudaIpcGetMemHandle)
MISSING(cudaIpcOpenEventHandle)
MISSING(cudaIpcOpenMemHandle)
MISSING(cudaKernelSetAttributeForDevice)
MISSING(cudaLaunchCooperativeKernel)
MISSING(cudaLibraryGetKernel)
MISSING(cudaLibraryLoadData)
MISSING(cudaLibraryUnload)
MISSING(cudaMemPoolGetAttribute)
MISSING(cudaMemPoolSetAccess)
MISSING(cudaMemPoolSetAttribute)
MISSING(cudaMemPoolTrimTo)
MISSING(cudaMemcpy2DAsync)
MISSING(cudaMemcpyToSymbol)
MISSING(cudaProfilerStart)
MISSING(cudaProfilerStop)
MISSING(cudaStreamAddCallback)
MISSING(cudaStreamBeginCaptureToGraph)
MISSING(cudaStreamUpdateCaptureDependencies)
}
