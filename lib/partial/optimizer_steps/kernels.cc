// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/kernels_internal.h"

#include <bit>
#include <cmath>

// A kernel is a struct with an operator() that makes one element of a step. Each is compiled
// once per instruction set, in a loop that the compiler vectorises. Addition, multiplication,
// division, root and fused multiply-add are rounded correctly at any width. kFused selects
// torch's rounding of a sum after a product; -ffp-contract=off keeps the compiler from choosing.

#if defined(__x86_64__)
#define SW_REPLAY_X86 1
#endif

#define SW_INLINE [[gnu::always_inline]] inline

// Lets the compiler vectorise the next loop, because the arrays of a step do not overlap.
#if defined(__clang__)
#define SW_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define SW_AVX512 "avx512f,avx512dq,avx512vl,fma"
#else
#define SW_INDEPENDENT _Pragma("GCC ivdep")
#define SW_AVX512 "avx512f,avx512dq,avx512vl,fma,prefer-vector-width=512"
#endif

namespace shardwright::optimizer_steps {
namespace {

/// Returns a * b + c, like torch's add(alpha), addcmul and lerp.
template <bool kFused>
SW_INLINE float MultiplyAdd(float a, float b, float c) {
  if constexpr (kFused) {
    return __builtin_fmaf(a, b, c);
  } else {
    return a * b + c;
  }
}

/// Returns torch.sqrt by the table in Numbers. \param root  the correctly rounded root
SW_INLINE float RootByTable(const Numbers& n, float value, float root) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // Multiplying by an even power of 2 normalizes subnormals and keeps the table's entry.
  const auto scaled = std::bit_cast<std::uint32_t>(value * 0x1p64F);
  const std::uint32_t key = (bits < 0x00800000U ? scaled : bits) & 0x00FFFFFFU;
  const std::uint32_t code = (n.root_words[key / 16] >> (2 * (key % 16))) & 3U;
  const bool regular = bits - n.root_first <= n.root_last - n.root_first;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(root) + (regular ? code - 1U : 0U));
}

template <bool kFused, bool kL2>
SW_INLINE float GradientOf(const Numbers& n, float gradient, float param) {
  const float g = gradient * n.gradient_factor;
  if constexpr (kL2) {
    return MultiplyAdd<kFused>(param, n.weight_decay, g);
  } else {
    return g;
  }
}

/// Kernels with a root have two parts: Before returns its argument, After uses the root.
template <bool kFused, bool kL2, bool kAmsgrad>
struct Adam {
  static constexpr bool kHasRoot = true;

  /// \returns the argument of the root
  SW_INLINE float Before(const Numbers& n, const Arrays& a, std::size_t i) const {
    const float g = GradientOf<kFused, kL2>(n, a.gradient[i], a.param[i] * n.param_factor);
    float m = a.states[0][i];
    float v = a.states[1][i];
    // Tensor.lerp_ starts from the nearer end.
    const bool near = std::fabs(n.lerp_weight) < 0.5F;
    const float weight = near ? n.lerp_weight : n.lerp_weight - 1.0F;
    m = MultiplyAdd<kFused>(weight, g - m, near ? m : g);
    v = MultiplyAdd<kFused>(n.one_minus_beta2 * g, g, v * n.beta2);
    a.states[0][i] = m;
    a.states[1][i] = v;
    if constexpr (kAmsgrad) {
      // torch.maximum returns NaN if one argument is NaN.
      const float most = a.states[2][i];
      v = (most > v || most != most) ? most : v;
      a.states[2][i] = v;
    }
    return v;
  }

  SW_INLINE void After(const Numbers& n, const Arrays& a, std::size_t i, float root) const {
    const float divisor = root / n.root_correction + n.eps;
    a.param[i] = a.param[i] * n.param_factor + n.minus_lr * a.states[0][i] / divisor;
  }
};

template <bool kFused, bool kL2, bool kNesterov, bool kFirst>
struct Momentum {
  static constexpr bool kHasRoot = false;

  SW_INLINE void operator()(const Numbers& n, const Arrays& a, std::size_t i) const {
    const float param = a.param[i];
    float g = GradientOf<kFused, kL2>(n, a.gradient[i], param);
    float buffer = g;
    if constexpr (!kFirst) {
      buffer = MultiplyAdd<kFused>(g, n.one_minus_dampening, a.states[0][i] * n.momentum);
    }
    a.states[0][i] = buffer;
    g = kNesterov ? MultiplyAdd<kFused>(buffer, n.momentum, g) : buffer;
    a.param[i] = MultiplyAdd<kFused>(g, n.minus_lr, param);
  }
};

template <bool kFused, bool kL2>
struct PlainSgd {
  static constexpr bool kHasRoot = false;

  SW_INLINE void operator()(const Numbers& n, const Arrays& a, std::size_t i) const {
    const float param = a.param[i];
    const float g = GradientOf<kFused, kL2>(n, a.gradient[i], param);
    a.param[i] = MultiplyAdd<kFused>(g, n.minus_lr, param);
  }
};

template <bool kFused, bool kL2>
struct Adagrad {
  static constexpr bool kHasRoot = true;

  SW_INLINE float Before(const Numbers& n, const Arrays& a, std::size_t i) const {
    const float g = GradientOf<kFused, kL2>(n, a.gradient[i], a.param[i]);
    const float sum = MultiplyAdd<kFused>(g, g, a.states[0][i]);
    a.states[0][i] = sum;
    return sum;
  }

  SW_INLINE void After(const Numbers& n, const Arrays& a, std::size_t i, float root) const {
    const float param = a.param[i];
    const float g = GradientOf<kFused, kL2>(n, a.gradient[i], param);
    a.param[i] = param + n.minus_lr * g / (root + n.eps);
  }
};

template <bool kFused>
struct Lion {
  static constexpr bool kHasRoot = false;

  SW_INLINE void operator()(const Numbers& n, const Arrays& a, std::size_t i) const {
    const float param = a.param[i] * n.param_factor;
    const float g = GradientOf<kFused, false>(n, a.gradient[i], param);
    const float m = a.states[0][i];
    const float update = m * n.beta1 + g * n.one_minus_beta1;
    // torch.sign returns 0 for NaN.
    const float sign = (update > 0.0F ? 1.0F : 0.0F) - (update < 0.0F ? 1.0F : 0.0F);
    a.param[i] = MultiplyAdd<kFused>(sign, n.minus_lr, param);
    a.states[0][i] = MultiplyAdd<kFused>(g, n.one_minus_beta2, m * n.beta2);
  }
};

/// Looks up square roots in blocks, because the lookup does not vectorise but the rest does.
template <class Kernel>
SW_INLINE void LoopByTable(const Numbers& n, const Arrays& a) {
  constexpr std::size_t kBlock = 256;
  float values[kBlock];
  float roots[kBlock];
  for (std::size_t first = 0; first < a.count; first += kBlock) {
    const std::size_t count = a.count - first < kBlock ? a.count - first : kBlock;
    SW_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = Kernel().Before(n, a, first + i);
      roots[i] = __builtin_sqrtf(values[i]);
    }
    for (std::size_t i = 0; i < count; ++i) roots[i] = RootByTable(n, values[i], roots[i]);
    SW_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) Kernel().After(n, a, first + i, roots[i]);
  }
}

template <class Kernel>
SW_INLINE void Loop(Numbers n, const Arrays& arrays) {
  const Arrays a = arrays;
  const std::size_t count = a.count;
  if constexpr (Kernel::kHasRoot) {
    if (n.root_words != nullptr) return LoopByTable<Kernel>(n, a);
    SW_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      Kernel().After(n, a, i, __builtin_sqrtf(Kernel().Before(n, a, i)));
    }
  } else {
    SW_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) Kernel()(n, a, i);
  }
}

template <class Kernel>
void OnBaseline(const Numbers& n, const Arrays& a) {
  Loop<Kernel>(n, a);
}

#ifdef SW_REPLAY_X86
template <class Kernel>
[[gnu::target("avx2,fma")]] void OnAvx2(const Numbers& n, const Arrays& a) {
  Loop<Kernel>(n, a);
}

template <class Kernel>
[[gnu::target(SW_AVX512)]] void OnAvx512(const Numbers& n, const Arrays& a) {
  Loop<Kernel>(n, a);
}
#endif

template <class Kernel>
void On(Isa isa, const Numbers& n, const Arrays& a) {
#ifdef SW_REPLAY_X86
  if (isa == Isa::kAvx512) return OnAvx512<Kernel>(n, a);
  if (isa == Isa::kAvx2) return OnAvx2<Kernel>(n, a);
#endif
  static_cast<void>(isa);
  OnBaseline<Kernel>(n, a);
}

template <bool kFused, bool kL2>
void RunWith(const Step& step, const Numbers& n, Isa isa, const Arrays& a) {
  switch (step.optimizer) {
    case Optimizer::kAdamW:
    case Optimizer::kAdam:
      return step.amsgrad ? On<Adam<kFused, kL2, true>>(isa, n, a)
                          : On<Adam<kFused, kL2, false>>(isa, n, a);
    case Optimizer::kSgd:
      if (step.momentum == 0) return On<PlainSgd<kFused, kL2>>(isa, n, a);
      if (step.nesterov) {
        return step.first_momentum ? On<Momentum<kFused, kL2, true, true>>(isa, n, a)
                                   : On<Momentum<kFused, kL2, true, false>>(isa, n, a);
      }
      return step.first_momentum ? On<Momentum<kFused, kL2, false, true>>(isa, n, a)
                                 : On<Momentum<kFused, kL2, false, false>>(isa, n, a);
    case Optimizer::kAdagrad:
      return On<Adagrad<kFused, kL2>>(isa, n, a);
    case Optimizer::kLion:
      return On<Lion<kFused>>(isa, n, a);
  }
}

bool AddsDecay(const Step& step) {
  return step.weight_decay != 0 && step.optimizer != Optimizer::kAdamW &&
         step.optimizer != Optimizer::kLion;
}

}  // namespace

bool HasIsa(Isa isa) {
#ifdef SW_REPLAY_X86
  switch (isa) {
    case Isa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::kBaseline:
      return true;
  }
#endif
  return isa == Isa::kBaseline;
}

Isa BestIsa() {
  static const Isa kBest = HasIsa(Isa::kAvx512) ? Isa::kAvx512
                           : HasIsa(Isa::kAvx2) ? Isa::kAvx2
                                                : Isa::kBaseline;
  return kBest;
}

Numbers NumbersOf(const Step& step, const RootTable* roots) {
  // Python computes in doubles; torch rounds each argument of a kernel to float32.
  const auto rounded = [](double value) { return static_cast<float>(value); };
  const double count = step.count;
  Numbers n;
  n.gradient_factor = rounded(step.gradient_factor);
  if (step.maximize) n.gradient_factor = -n.gradient_factor;
  if (AddsDecay(step)) {
    n.weight_decay = rounded(step.weight_decay);
  } else if (step.weight_decay != 0) {
    n.param_factor = rounded(1 - step.lr * step.weight_decay);
  }
  n.beta1 = rounded(step.beta1);
  n.beta2 = rounded(step.beta2);
  n.one_minus_beta1 = rounded(1 - step.beta1);
  n.one_minus_beta2 = rounded(1 - step.beta2);
  n.lerp_weight = n.one_minus_beta1;
  n.eps = rounded(step.eps);
  n.momentum = rounded(step.momentum);
  n.one_minus_dampening = rounded(1 - step.dampening);
  double lr = step.lr;
  if (step.optimizer == Optimizer::kAdamW || step.optimizer == Optimizer::kAdam) {
    lr = step.lr / (1 - std::pow(step.beta1, count));
    // Python's ** 0.5 is pow, which may round differently from sqrt.
    volatile const double half = 0.5;
    n.root_correction = rounded(std::pow(1 - std::pow(step.beta2, count), half));
  } else if (step.optimizer == Optimizer::kAdagrad) {
    lr = step.lr / (1 + (count - 1) * step.lr_decay);
  }
  n.minus_lr = rounded(-lr);
  if (roots != nullptr) {
    n.root_words = roots->words().data();
    const bool subnormals = (roots->last() & RootTable::kSubnormals) != 0;
    n.root_first = subnormals ? 1U : 0x00800000U;
    n.root_last = roots->last() & ~RootTable::kSubnormals;
  }
  return n;
}

void RunKernel(const Step& step, const Numbers& numbers, Isa isa, const Arrays& arrays) {
  const bool l2 = AddsDecay(step);
  if (step.rounding == Rounding::kFused) {
    l2 ? RunWith<true, true>(step, numbers, isa, arrays)
       : RunWith<true, false>(step, numbers, isa, arrays);
  } else {
    l2 ? RunWith<false, true>(step, numbers, isa, arrays)
       : RunWith<false, false>(step, numbers, isa, arrays);
  }
}

}  // namespace shardwright::optimizer_steps
