// SIGBUS handler that reports a memory-mapped file that was truncated while it was read. The default action of SIGBUS
// kills the process silently. The handler calls only async-signal-safe functions.

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace {

constexpr int kBadInput = 2;
constexpr size_t kLongestLine = 4608;

char g_prefix[64];
struct sigaction g_previous;

void put(const char* text) {
    size_t left = strlen(text);
    while (left > 0) {
        const ssize_t written = write(STDERR_FILENO, text, left);
        if (written <= 0) return;
        text += written;
        left -= static_cast<size_t>(written);
    }
}

uintptr_t read_hex(const char** text) {
    uintptr_t value = 0;
    for (;; ++*text) {
        const char c = **text;
        if (c >= '0' && c <= '9') {
            value = value * 16 + static_cast<uintptr_t>(c - '0');
        } else if (c >= 'a' && c <= 'f') {
            value = value * 16 + static_cast<uintptr_t>(c - 'a' + 10);
        } else {
            return value;
        }
    }
}

// Return the path of the mapped file in a line of /proc/self/maps if it contains the address, else null.
const char* mapped_path(char* line, uintptr_t address) {
    const char* at = line;
    const uintptr_t begin = read_hex(&at);
    if (*at != '-') return nullptr;
    ++at;
    const uintptr_t end = read_hex(&at);
    return address >= begin && address < end ? strchr(at, '/') : nullptr;
}

const char* find_file(uintptr_t address, char* line) {
    const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (maps < 0) return nullptr;
    char block[1024];
    size_t length = 0;
    ssize_t count;
    while ((count = read(maps, block, sizeof block)) > 0) {
        for (ssize_t i = 0; i < count; ++i) {
            if (block[i] != '\n') {
                if (length < kLongestLine - 1) line[length++] = block[i];
                continue;
            }
            line[length] = '\0';
            length = 0;
            const char* path = mapped_path(line, address);
            if (path != nullptr) {
                close(maps);
                return path;
            }
        }
    }
    close(maps);
    return nullptr;
}

void on_bus_error(int, siginfo_t* info, void*) {
    char line[kLongestLine];
    const char* path =
        info->si_code == BUS_ADRERR ? find_file(reinterpret_cast<uintptr_t>(info->si_addr), line) : nullptr;
    // Shared memory is also a file, but there SIGBUS means that it is full.
    if (path != nullptr && strncmp(path, "/dev/shm/", 9) != 0) {
        put(g_prefix);
        put(path);
        put(" became shorter while it was being read, or its disk failed; bring the whole file back and start again\n");
        _exit(kBadInput);
    }
    // The access is repeated after the return, now with the previous handler.
    sigaction(SIGBUS, &g_previous, nullptr);
}

void install(const std::string& prefix) {
    if (prefix.size() >= sizeof g_prefix) throw std::invalid_argument("the prefix is too long");
    memcpy(g_prefix, prefix.c_str(), prefix.size() + 1);
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    struct sigaction previous;
    if (sigaction(SIGBUS, &action, &previous) != 0) throw std::runtime_error("SIGBUS cannot be handled");
    if (!(previous.sa_flags & SA_SIGINFO) || previous.sa_sigaction != on_bus_error) g_previous = previous;
}

}  // namespace

PYBIND11_MODULE(_bus_error, module) {
    module.doc() = "A line and an exit status for a mapped file that becomes shorter.";
    module.def("install", &install, pybind11::arg("prefix"),
               "Handle SIGBUS: name the file after the prefix and exit with status 2.");
}
