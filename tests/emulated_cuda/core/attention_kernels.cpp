// Attention for which only CUDA has kernels. The CPU's flash kernel computes what it can, as it does for CPU tensors. The
// rest is computed step by step in float32 and rounded once.
#include "generator.h"
#include "kernel_rules.h"
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/ceil_div.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace emulated_cuda {
namespace {

using at::Tensor;
using std::optional;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// mem_eff_attention/kernel_forward.h, kAlignLSE
constexpr int64_t kAlignment = 32;

// How queries may look at keys: of as many keys as queries, or of more.
enum class Corner { kTopLeft, kBottomRight };

struct Rule {
  double scale;
  double dropout = 0.0;
  bool is_causal = false;
  Corner corner = Corner::kBottomRight;
  // Keys at most so far before and after the query's place; -1: any.
  int64_t window_left = -1;
  int64_t window_right = -1;
  // The log-sum-exp of a query that sees no key. The flash kernel's is +inf (softmax.h, normalize_softmax_lse).
  double blind = -kInfinity;
};

double scale_of(const Tensor& query, optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
}

// All tensors of these functions are of the host, [b, heads, s, d].
struct Attention {
  Tensor query, key, value, bias;
  Rule rule;

  bool has_kernel_of_cpu() const {
    const bool is_square = query.size(2) == key.size(2);
    const bool has_window = rule.window_left >= 0 || rule.window_right > 0 || (rule.window_right == 0 && !rule.is_causal);
    return rule.dropout == 0.0 && !has_window && (!rule.is_causal || is_square) && query.size(3) == value.size(3) &&
        (!bias.defined() || bias.dim() == 4) && query.numel() > 0 && key.numel() > 0;
  }

  int64_t heads_per_group() const {
    return query.size(1) / key.size(1);
  }

  Tensor spread(const Tensor& groups) const {
    return heads_per_group() == 1 ? groups : groups.repeat_interleave(heads_per_group(), 1);
  }

  Tensor gathered(const Tensor& of_heads, const Tensor& groups) const {
    return heads_per_group() == 1 ? of_heads
                                  : of_heads.unflatten(1, {groups.size(1), heads_per_group()}).sum(2, false, at::kFloat);
  }

  // True where a query may look at a key; undefined: everywhere.
  Tensor visible() const {
    const int64_t left = rule.window_left, right = rule.is_causal ? 0 : rule.window_right;
    if (left < 0 && right < 0) {
      return {};
    }
    const int64_t shift = rule.corner == Corner::kBottomRight ? key.size(2) - query.size(2) : 0;
    const Tensor places = at::arange(query.size(2), at::kLong).add(shift).unsqueeze(1);
    const Tensor keys = at::arange(key.size(2), at::kLong).unsqueeze(0);
    Tensor allowed = at::ones({query.size(2), key.size(2)}, at::kBool);
    if (left >= 0) {
      allowed = allowed.logical_and(keys >= places - left);
    }
    if (right >= 0) {
      allowed = allowed.logical_and(keys <= places + right);
    }
    return allowed;
  }

  Tensor scores() const {
    Tensor result = query.to(at::kFloat).matmul(spread(key).to(at::kFloat).transpose(-2, -1)).mul_(rule.scale);
    if (bias.defined()) {
      result.add_(bias);
    }
    if (const Tensor allowed = visible(); allowed.defined()) {
      result.masked_fill_(allowed.logical_not(), -kInfinity);
    }
    return result;
  }

  // What dropout multiplies the weights by: the same for the forward and the backward pass, from the seed.
  Tensor kept(int64_t seed) const {
    const at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
    const Tensor drawn = at::rand({query.size(0), query.size(1), query.size(2), key.size(2)}, generator, at::kFloat);
    return (drawn >= rule.dropout).to(at::kFloat).div_(1.0 - rule.dropout);
  }

  std::pair<Tensor, Tensor> forward(int64_t seed) const {
    if (has_kernel_of_cpu()) {
      const auto [output, row_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
          query, spread(key), spread(value), 0.0, rule.is_causal, bias.defined() ? optional<Tensor>(bias) : std::nullopt, rule.scale);
      return {output, row_sums};
    }
    const Tensor all = scores();
    const Tensor row_sums = all.logsumexp(-1);
    const Tensor is_blind = row_sums.isneginf();
    Tensor weights = (all - row_sums.masked_fill(is_blind, 0.0).unsqueeze(-1)).exp_();
    if (rule.dropout > 0.0) {
      weights.mul_(kept(seed));
    }
    return {weights.matmul(spread(value).to(at::kFloat)), row_sums.masked_fill(is_blind, rule.blind)};
  }

  // Gradients of query, key, value and bias, the last one only if `wants_bias`.
  std::array<Tensor, 4> backward(
      const Tensor& grad, const Tensor& output, const Tensor& row_sums, int64_t seed, bool wants_bias) const {
    if (has_kernel_of_cpu() && !wants_bias) {
      const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grad, query, spread(key), spread(value), output, row_sums, 0.0, rule.is_causal,
          bias.defined() ? optional<Tensor>(bias) : std::nullopt, rule.scale);
      return {of_query, gathered(of_key, key), gathered(of_value, value), Tensor()};
    }
    const Tensor wide_grad = grad.to(at::kFloat);
    const Tensor is_finite = row_sums.isfinite();
    Tensor weights = (scores() - row_sums.masked_fill(is_finite.logical_not(), 0.0).unsqueeze(-1)).exp_();
    weights.masked_fill_(is_finite.logical_not().unsqueeze(-1), 0.0);
    Tensor of_weights = wide_grad.matmul(spread(value).to(at::kFloat).transpose(-2, -1));
    Tensor dropped = weights;
    if (rule.dropout > 0.0) {
      const Tensor factors = kept(seed);
      dropped = weights * factors;
      of_weights.mul_(factors);
    }
    const Tensor row_products = wide_grad.mul(output.to(at::kFloat)).sum(-1, true);
    const Tensor of_scores = weights.mul(of_weights.sub_(row_products));
    const Tensor of_key = of_scores.transpose(-2, -1).matmul(query.to(at::kFloat)).mul_(rule.scale);
    return {of_scores.matmul(spread(key).to(at::kFloat)).mul_(rule.scale), gathered(of_key, key),
            gathered(dropped.transpose(-2, -1).matmul(wide_grad), value), wants_bias ? of_scores : Tensor()};
  }
};

// A seed that dropout draws from, on the host of a tensor that a kernel writes.
int64_t draw_seed(c10::DeviceIndex device) {
  at::Generator generator = default_generator(device).get<DeviceGenerator>()->next_kernel();
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, generator, at::kLong).item<int64_t>();
}

int64_t seed_in(const Tensor& state) {
  int64_t seed = 0;
  if (state.defined() && state.numel() > 0) {
    std::memcpy(&seed, state.const_data_ptr(), sizeof(seed));
  }
  return seed;
}

// Run a forward pass: write the output, the log-sum-exp (if it is defined), and the seed of dropout.
void run_forward(
    const char* name, const Attention& device, const Tensor& output, const Tensor& row_sums, const Tensor& state) {
  std::vector<Operand> operands{{device.query, false, "query"}, {device.key, false, "key"}, {device.value, false, "value"}};
  Attention host{on_host_unowned(device.query), on_host_unowned(device.key), on_host_unowned(device.value), {}, device.rule};
  if (device.bias.defined()) {
    operands.push_back({device.bias, false, "attn_bias"});
    host.bias = on_host_unowned(device.bias);
  }
  for (const auto& [tensor, what] : {std::pair(output, "its output"), std::pair(row_sums, "its log-sum-exp"), std::pair(state, "its seed")}) {
    if (tensor.defined() && tensor.numel() > 0) {
      operands.push_back({tensor, true, what});
    }
  }
  const auto index = device.query.device().index();
  run_work(name, current_stream(index), operands,
           [host, index, target = on_host_unowned(output), sums = on_host_unowned(row_sums), seed_place = on_host_unowned(state)] {
             const int64_t seed = host.rule.dropout > 0.0 ? draw_seed(index) : 0;
             if (seed_place.defined() && seed_place.numel() > 0) {
               std::memset(seed_place.mutable_data_ptr(), 0, seed_place.nbytes());
               std::memcpy(seed_place.mutable_data_ptr(), &seed, sizeof(seed));
             }
             const auto [values, of_rows] = host.forward(seed);
             target.copy_(values);
             if (sums.defined() && sums.numel() > 0) {
               sums.fill_(kInfinity);
               sums.narrow(-1, 0, of_rows.size(-1)).copy_(of_rows);
             }
           });
}

struct Saved {
  Tensor grad, output, row_sums, state;
};

void run_backward(const char* name, const Attention& device, const Saved& saved, const std::array<Tensor, 4>& grads) {
  std::vector<Operand> operands{{device.query, false, "query"}, {device.key, false, "key"}, {device.value, false, "value"},
                                {saved.grad, false, "grad_out"}, {saved.output, false, "out"}, {saved.row_sums, false, "logsumexp"}};
  Attention host{on_host_unowned(device.query), on_host_unowned(device.key), on_host_unowned(device.value), {}, device.rule};
  if (device.bias.defined()) {
    operands.push_back({device.bias, false, "attn_bias"});
    host.bias = on_host_unowned(device.bias);
  }
  Saved held{on_host_unowned(saved.grad), on_host_unowned(saved.output), on_host_unowned(saved.row_sums), {}};
  if (device.rule.dropout > 0.0) {
    operands.push_back({saved.state, false, "rng_state"});
    held.state = on_host_unowned(saved.state);
  }
  std::array<Tensor, 4> targets;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined()) {
      operands.push_back({grads[i], true, "a gradient"});
      targets[i] = on_host_unowned(grads[i]);
    }
  }
  run_work(name, current_stream(device.query.device().index()), operands, [host, held, targets] {
    const Tensor sums = held.row_sums.narrow(-1, 0, host.query.size(2));
    const auto values = host.backward(held.grad, held.output, sums, seed_in(held.state), targets[3].defined());
    for (size_t i = 0; i < targets.size(); ++i) {
      if (targets[i].defined()) {
        targets[i].copy_(i == 3 ? at::sum_to(values[i], targets[i].sizes()) : values[i]);
      }
    }
  });
}

Tensor empty_like_heads(const Tensor& query, int64_t width) {
  // The kernels write [b, s, heads, d].
  return at::empty({query.size(0), query.size(2), query.size(1), width}, query.options()).transpose(1, 2);
}

Tensor empty_state(const Tensor& query, int64_t numbers) {
  return at::empty({numbers}, query.options().dtype(at::kUInt64));
}

Tensor nothing(const Tensor& query) {
  return at::empty({0}, query.options());
}

// ---- torch's flash kernels

Rule flash_rule(
    const Tensor& query, optional<double> scale, double dropout, bool is_causal, optional<int64_t> left, optional<int64_t> right) {
  Rule rule{scale_of(query, scale), dropout, is_causal, Corner::kBottomRight, left.value_or(-1), right.value_or(-1)};
  rule.blind = kInfinity;
  return rule;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> flash_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& cum_seq_q, const optional<Tensor>& cum_seq_k,
    c10::SymInt, c10::SymInt, double dropout, bool is_causal, bool return_debug_mask, optional<double> scale,
    optional<c10::SymInt> window_left, optional<c10::SymInt> window_right, const optional<Tensor>& seqused_k,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& block_table, optional<int64_t>) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cum_seq_q && !cum_seq_k && !seqused_k && !alibi_slopes && !block_table && !return_debug_mask,
                              "flash attention with lengths, slopes or a block table is not emulated");
  check_flash_forward(query, key, value, dropout);
  const auto number = [](const optional<c10::SymInt>& given) {
    return given ? optional<int64_t>(given->expect_int()) : std::nullopt;
  };
  const Rule rule = flash_rule(query, scale, dropout, is_causal, number(window_left), number(window_right));
  Tensor output = at::empty_like(query);
  Tensor row_sums = at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(at::kFloat));
  Tensor state = empty_state(query, 2);
  run_forward("aten::_flash_attention_forward",
              {query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), {}, rule}, output.transpose(1, 2), row_sums, state);
  return {output, row_sums, state, empty_state(query, 0), nothing(query)};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& row_sums, const Tensor& cum_seq_q, const Tensor& cum_seq_k, c10::SymInt, c10::SymInt, double dropout,
    bool is_causal, const Tensor& state, const Tensor&, optional<double> scale, optional<c10::SymInt> window_left,
    optional<c10::SymInt> window_right) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cum_seq_q.defined() && !cum_seq_k.defined(), "flash attention with lengths is not emulated");
  // attention_backward.cu, _flash_attention_backward makes grad_out and out contiguous first.
  const Tensor whole_grad = grad.contiguous(), whole_output = output.contiguous();
  check_flash_backward(whole_grad, query, key, value, whole_output, row_sums, dropout);
  const auto number = [](const optional<c10::SymInt>& given) {
    return given ? optional<int64_t>(given->expect_int()) : std::nullopt;
  };
  const Rule rule = flash_rule(query, scale, dropout, is_causal, number(window_left), number(window_right));
  Tensor of_query = at::empty_like(query), of_key = at::empty_like(key), of_value = at::empty_like(value);
  run_backward("aten::_flash_attention_backward",
               {query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), {}, rule},
               {whole_grad.transpose(1, 2), whole_output.transpose(1, 2), row_sums, state},
               {of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2), Tensor()});
  return {of_query, of_key, of_value};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> sdp_flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool is_causal, bool return_debug_mask,
    optional<double> scale) {
  TORCH_CHECK_NOT_IMPLEMENTED(!return_debug_mask, "the mask of dropout is not emulated");
  check_flash_forward(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), dropout);
  const Rule rule = flash_rule(query, scale, dropout, is_causal, std::nullopt, std::nullopt);
  Tensor output = empty_like_heads(query, query.size(3));
  Tensor row_sums = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  Tensor state = empty_state(query, 2);
  run_forward("aten::_scaled_dot_product_flash_attention", {query, key, value, {}, rule}, output, row_sums, state);
  return {output, row_sums, Tensor(), Tensor(), query.size(2), key.size(2), state, empty_state(query, 0), nothing(query)};
}

std::tuple<Tensor, Tensor, Tensor> sdp_flash_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& row_sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    const Tensor& state, const Tensor&, optional<double> scale) {
  if (!grad.defined()) {
    return {};
  }
  const Tensor whole_grad = grad.transpose(1, 2).contiguous(), whole_output = output.transpose(1, 2).contiguous();
  check_flash_backward(whole_grad, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), whole_output, row_sums, dropout);
  const Rule rule = flash_rule(query, scale, dropout, is_causal, std::nullopt, std::nullopt);
  const auto make = [](const Tensor& tensor) { return at::empty_like(tensor.transpose(1, 2)).transpose(1, 2); };
  Tensor of_query = make(query), of_key = make(key), of_value = make(value);
  run_backward("aten::_scaled_dot_product_flash_attention_backward", {query, key, value, {}, rule},
               {whole_grad.transpose(1, 2), whole_output.transpose(1, 2), row_sums, state}, {of_query, of_key, of_value, Tensor()});
  return {of_query, of_key, of_value};
}

// ---- memory-efficient attention

Rule efficient_rule(const Tensor& query, optional<double> scale, double dropout, bool is_causal) {
  return {scale_of(query, scale), dropout, is_causal, Corner::kTopLeft};
}

// A bias with the sizes of the scores; sizes of 1 are repeated.
Tensor whole_bias(const optional<Tensor>& bias, const Tensor& query, const Tensor& key) {
  return bias && bias->defined() ? bias->expand({query.size(0), query.size(1), query.size(2), key.size(2)}) : Tensor();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sdp_efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& bias, bool has_row_sums, double dropout,
    bool is_causal, optional<double> scale) {
  check_efficient(query, key, value, bias);
  Tensor output = empty_like_heads(query, value.size(3));
  const int64_t length = has_row_sums ? at::ceil_div(query.size(2), kAlignment) * kAlignment : 0;
  Tensor row_sums = at::empty({query.size(0), query.size(1), length}, query.options().dtype(at::kFloat));
  Tensor state = at::empty({}, query.options().dtype(at::kLong));
  run_forward("aten::_scaled_dot_product_efficient_attention",
              {query, key, value, whole_bias(bias, query, key), efficient_rule(query, scale, dropout, is_causal)}, output, row_sums, state);
  return {output, row_sums, state, at::empty({}, query.options().dtype(at::kLong))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sdp_efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor& output,
    const Tensor& row_sums, const Tensor& state, const Tensor&, double dropout, std::array<bool, 4> wanted, bool is_causal,
    optional<double> scale) {
  if (!grad.defined()) {
    return {};
  }
  const optional<Tensor> given = bias.defined() ? optional<Tensor>(bias) : std::nullopt;
  check_efficient(query, key, value, given);
  TORCH_CHECK(row_sums.size(-1) >= query.size(2), "the log-sum-exp is needed for a backward pass: compute_log_sumexp=True");
  const auto make = [](const Tensor& tensor) { return at::empty_like(tensor.transpose(1, 2)).transpose(1, 2); };
  Tensor of_query = make(query), of_key = make(key), of_value = make(value);
  Tensor of_bias = wanted[3] && given ? at::empty_like(bias) : Tensor();
  run_backward("aten::_scaled_dot_product_efficient_attention_backward",
               {query, key, value, whole_bias(given, query, key), efficient_rule(query, scale, dropout, is_causal)},
               {grad, output, row_sums, state}, {of_query, of_key, of_value, of_bias});
  return {of_query, of_key, of_value, of_bias};
}

// ---- cuDNN's attention

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> sdp_cudnn(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& bias, bool has_row_sums, double dropout,
    bool is_causal, bool, optional<double> scale) {
  check_cudnn(query, key, value, bias, dropout);
  Tensor output = empty_like_heads(query, value.size(3));
  Tensor row_sums = has_row_sums ? at::empty({query.size(0), query.size(1), query.size(2), 1}, query.options().dtype(at::kFloat)) : Tensor();
  Tensor state = at::empty({}, query.options().dtype(at::kLong));
  run_forward("aten::_scaled_dot_product_cudnn_attention",
              {query, key, value, whole_bias(bias, query, key), efficient_rule(query, scale, dropout, is_causal)}, output,
              row_sums.defined() ? row_sums.squeeze(-1) : row_sums, state);
  return {output, row_sums, Tensor(), Tensor(), query.size(2), key.size(2), state, at::empty({}, query.options().dtype(at::kLong)), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> sdp_cudnn_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& row_sums, const Tensor& state, const Tensor&, const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt,
    c10::SymInt, double dropout, bool is_causal, optional<double> scale) {
  if (!grad.defined()) {
    return {};
  }
  const optional<Tensor> given = bias.defined() ? optional<Tensor>(bias) : std::nullopt;
  check_cudnn(query, key, value, given, dropout);
  const auto make = [](const Tensor& tensor) { return at::empty_like(tensor.transpose(1, 2)).transpose(1, 2); };
  Tensor of_query = make(query), of_key = make(key), of_value = make(value);
  run_backward("aten::_scaled_dot_product_cudnn_attention_backward",
               {query, key, value, whole_bias(given, query, key), efficient_rule(query, scale, dropout, is_causal)},
               {grad, output, row_sums.squeeze(-1), state}, {of_query, of_key, of_value, Tensor()});
  return {of_query, of_key, of_value};
}

int64_t fused_sdp_choice(
    const Tensor& query, const Tensor& key, const Tensor& value, const optional<Tensor>& mask, double dropout, bool is_causal,
    optional<double>, bool has_groups) {
  return static_cast<int64_t>(choose_attention(query, key, value, mask, dropout, is_causal, has_groups));
}

const bool is_choice_registered = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&fused_sdp_choice);
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_flash_attention_forward", &flash_forward);
  m.impl("_flash_attention_backward", &flash_backward);
  m.impl("_scaled_dot_product_flash_attention", &sdp_flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &sdp_flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", &sdp_efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", &sdp_efficient_backward);
  m.impl("_scaled_dot_product_cudnn_attention", &sdp_cudnn);
  m.impl("_scaled_dot_product_cudnn_attention_backward", &sdp_cudnn_backward);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
}

}  // namespace emulated_cuda
