// The fast path of json_lines.py, which extracts UTF-8 texts from well-formed JSONL. Lines that are not clearly valid,
// with one string under each key, are left to Python's json module, which also reports errors.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace py = pybind11;

namespace {

constexpr int kMaxDepth = 64;
constexpr int kMaxNumberBytes = 300;  // Python rejects integers of thousands of digits
constexpr size_t kSlack = 16;         // a 16-byte store may exceed the end of the text

bool is_json_space(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }
bool is_blank(char c) { return is_json_space(c) || c == '\v' || c == '\f'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A growing buffer whose content is not initialized for each use.
class Buffer {
 public:
  void reserve(size_t size) {
    if (bytes_.size() < size) bytes_.resize(size);
  }
  char* begin() { return bytes_.data(); }
  std::string_view view() const { return {bytes_.data(), size}; }
  size_t size = 0;

 private:
  std::vector<char> bytes_;
};

// Return the length of the UTF-8 character of two or more bytes at p, or 0 if it is invalid.
int utf8_length(const char* p, const char* end) {
  const auto byte = [&](int i) { return static_cast<unsigned char>(p[i]); };
  const auto follows = [&](int i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned char lead = byte(0);
  if (lead >= 0xC2 && lead <= 0xDF) return end - p >= 2 && follows(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (end - p < 3 || !follows(1) || !follows(2)) return 0;
    if (lead == 0xE0 && byte(1) < 0xA0) return 0;   // overlong encoding
    if (lead == 0xED && byte(1) >= 0xA0) return 0;  // surrogate
    return 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (end - p < 4 || !follows(1) || !follows(2) || !follows(3)) return 0;
    if (lead == 0xF0 && byte(1) < 0x90) return 0;
    if (lead == 0xF4 && byte(1) >= 0x90) return 0;  // above U+10FFFF
    return 4;
  }
  return 0;
}

int hex_digits(const char* p) {
  int value = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = p[i];
    const int digit = is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

char* write_utf8(char* out, uint32_t code) {
  if (code < 0x80) {
    *out++ = static_cast<char>(code);
  } else if (code < 0x800) {
    *out++ = static_cast<char>(0xC0 | code >> 6);
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    *out++ = static_cast<char>(0xE0 | code >> 12);
    *out++ = static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  } else {
    *out++ = static_cast<char>(0xF0 | code >> 18);
    *out++ = static_cast<char>(0x80 | (code >> 12 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code >> 6 & 0x3F));
    *out++ = static_cast<char>(0x80 | (code & 0x3F));
  }
  return out;
}

// Parser of one line. Every function advances `p_` and returns false if Python must parse the line.
class Line {
 public:
  Line(const char* begin, const char* end) : p_(begin), end_(end) {}

  bool read_texts(const std::vector<std::string>& keys, std::vector<Buffer>& texts, Buffer& scratch) {
    std::vector<bool>& found = found_;
    found.assign(keys.size(), false);
    if (!next('{')) return false;
    if (next('}')) return false;  // no key at all
    do {
      if (!next('"') || !string(scratch) || !next(':')) return false;
      size_t k = 0;
      while (k < keys.size() && keys[k] != scratch.view()) ++k;
      if (k == keys.size()) {
        if (!skip_value(scratch, 0)) return false;
      } else {
        if (found[k] || !next('"') || !string(texts[k])) return false;
        found[k] = true;
      }
    } while (next(','));
    if (!next('}')) return false;
    skip_space();
    if (p_ != end_) return false;
    for (bool one : found)
      if (!one) return false;
    return true;
  }

 private:
  void skip_space() {
    while (p_ != end_ && is_json_space(*p_)) ++p_;
  }

  bool next(char wanted) {
    skip_space();
    if (p_ == end_ || *p_ != wanted) return false;
    ++p_;
    return true;
  }

  // Decode a string whose opening quote was read. The decoded text is never longer than its source.
  bool string(Buffer& into) {
    into.reserve(static_cast<size_t>(end_ - p_) + kSlack);
    char* out = into.begin();
    for (;;) {
#ifdef __SSE2__
      while (end_ - p_ >= 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p_));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
        // As signed bytes, control characters and the bytes of multi-byte characters are below 0x20.
        const __m128i special = _mm_or_si128(
            _mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20)),
            _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')), _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'))));
        const int mask = _mm_movemask_epi8(special);
        const int plain = mask == 0 ? 16 : __builtin_ctz(static_cast<unsigned>(mask));
        p_ += plain;
        out += plain;
        if (plain < 16) break;
      }
#endif
      if (p_ == end_) return false;
      const char c = *p_;
      if (c == '"') {
        ++p_;
        into.size = static_cast<size_t>(out - into.begin());
        return true;
      }
      if (c == '\\') {
        if (!escape(out)) return false;
      } else if (static_cast<unsigned char>(c) >= 0x80) {
        do {
          const int length = utf8_length(p_, end_);
          if (length == 0) return false;
          for (int i = 0; i < length; ++i) *out++ = *p_++;
        } while (p_ != end_ && static_cast<unsigned char>(*p_) >= 0x80);
      } else if (c < 0x20) {
        return false;
      } else {
        *out++ = *p_++;
      }
    }
  }

  bool escape(char*& out) {
    if (end_ - p_ < 2) return false;
    const char kind = p_[1];
    p_ += 2;
    switch (kind) {
      case '"': *out++ = '"'; return true;
      case '\\': *out++ = '\\'; return true;
      case '/': *out++ = '/'; return true;
      case 'b': *out++ = '\b'; return true;
      case 'f': *out++ = '\f'; return true;
      case 'n': *out++ = '\n'; return true;
      case 'r': *out++ = '\r'; return true;
      case 't': *out++ = '\t'; return true;
      case 'u': break;
      default: return false;
    }
    if (end_ - p_ < 4) return false;
    int code = hex_digits(p_);
    if (code < 0) return false;
    p_ += 4;
    if (code >= 0xD800 && code <= 0xDFFF) {
      if (code >= 0xDC00 || end_ - p_ < 6 || p_[0] != '\\' || p_[1] != 'u') return false;
      const int low = hex_digits(p_ + 2);
      if (low < 0xDC00 || low > 0xDFFF) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      p_ += 6;
    }
    out = write_utf8(out, static_cast<uint32_t>(code));
    return true;
  }

  bool skip_value(Buffer& scratch, int depth) {
    skip_space();
    if (p_ == end_ || depth > kMaxDepth) return false;
    switch (*p_) {
      case '"': ++p_; return string(scratch);
      case 't': return word("true");
      case 'f': return word("false");
      case 'n': return word("null");
      case '[':
        ++p_;
        if (next(']')) return true;
        do {
          if (!skip_value(scratch, depth + 1)) return false;
        } while (next(','));
        return next(']');
      case '{':
        ++p_;
        if (next('}')) return true;
        do {
          if (!next('"') || !string(scratch) || !next(':') || !skip_value(scratch, depth + 1)) return false;
        } while (next(','));
        return next('}');
      default: return number();
    }
  }

  bool word(std::string_view wanted) {
    if (static_cast<size_t>(end_ - p_) < wanted.size() || std::string_view(p_, wanted.size()) != wanted) return false;
    p_ += wanted.size();
    return true;
  }

  bool digits() {
    const char* begin = p_;
    while (p_ != end_ && is_digit(*p_)) ++p_;
    return p_ != begin;
  }

  bool number() {
    const char* begin = p_;
    if (*p_ == '-') ++p_;
    if (p_ == end_) return false;
    if (*p_ == '0') {
      ++p_;
    } else if (!digits()) {
      return false;
    }
    if (p_ != end_ && *p_ == '.') {
      ++p_;
      if (!digits()) return false;
    }
    if (p_ != end_ && (*p_ == 'e' || *p_ == 'E')) {
      ++p_;
      if (p_ != end_ && (*p_ == '+' || *p_ == '-')) ++p_;
      if (!digits()) return false;
    }
    return p_ - begin <= kMaxNumberBytes;
  }

  const char* p_;
  const char* end_;
  std::vector<bool> found_;
};

py::tuple extract_texts(const py::bytes& block, const std::vector<std::string>& keys) {
  const std::string_view data = block;
  const char* p = data.data();
  const char* end = p + data.size();
  std::vector<Buffer> texts(keys.size());
  Buffer scratch;
  py::list result;
  std::vector<int64_t> places;
  int64_t number = 0;
  for (; p != end; ++number) {
    const void* newline = std::memchr(p, '\n', static_cast<size_t>(end - p));
    const char* stop = newline == nullptr ? end : static_cast<const char*>(newline);
    const char* after = newline == nullptr ? end : stop + 1;
    const char* first = p;
    while (first != stop && is_blank(*first)) ++first;
    if (first != stop) {
      if (Line(p, stop).read_texts(keys, texts, scratch)) {
        for (const Buffer& text : texts) result.append(py::bytes(text.view().data(), text.view().size()));
      } else {
        for (size_t k = 0; k < keys.size(); ++k) result.append(py::none());
      }
      places.insert(places.end(), {number, p - data.data(), stop - data.data()});
    }
    p = after;
  }
  py::array_t<int64_t> lines({static_cast<py::ssize_t>(places.size() / 3), static_cast<py::ssize_t>(3)});
  if (!places.empty()) std::memcpy(lines.mutable_data(), places.data(), places.size() * sizeof(int64_t));
  return py::make_tuple(result, lines, number);
}

}  // namespace

PYBIND11_MODULE(_json_lines, module) {
  module.def("extract_texts", &extract_texts, py::arg("block"), py::arg("keys"));
}
