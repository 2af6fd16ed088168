// The step and its backward on a CPU: every row is read from memory once, and walked again while it is in the cache.
//
// Formulas and names are those of ops/autograd.py, derived in docs/math.md. Sums over a row have the arithmetic's type
// (float, or double where an input is double); the few numbers that a row comes down to are double always.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;
using at::vec::Vectorized;

// --- one number a row ------------------------------------------------------------------------------------------------

enum class Kind { exponential, projection, cayley, general };

struct Options {
  double alpha, p, max_angle, radius;
  double limit_square = 0, cos_max = 0, sin_max = 0;
  bool clamp = false, resize;
  Kind kind;

  Options(const std::optional<Tensor>& tensor, double step, double exponent, std::optional<double> angle,
          std::optional<double> length)
      : alpha(tensor.has_value() ? tensor->detach().item().toDouble() : step),
        p(exponent),
        max_angle(angle.value_or(0)),
        radius(length.value_or(0)),
        resize(length.has_value()),
        kind(std::isinf(exponent) ? Kind::exponential
             : exponent == 1.0    ? Kind::projection
             : exponent == 2.0    ? Kind::cayley
                                  : Kind::general) {
    if (!angle.has_value()) return;
    double limit = max_angle;
    if (kind != Kind::exponential) {
      limit = max_angle / p < M_PI / 2 ? p * std::tan(max_angle / p) : std::numeric_limits<double>::infinity();
    }
    clamp = limit < std::sqrt(std::numeric_limits<double>::max());
    limit_square = limit * limit;
    cos_max = std::cos(max_angle);
    sin_max = std::sin(max_angle);
  }
};

// Power series in the squared argument, exact to double below the bounds that retractions.py names.
constexpr double trig_series_below = 0.25, atan_series_below = 0.02;

// How many times as long as x the part of u along x is where v is projected again, as in geometry.is_long.
constexpr double project_again_above = 4;

template <size_t size>
double series(const std::array<double, size>& coefficients, double z) {
  double total = coefficients[size - 1];
  for (size_t n = size - 1; n-- > 0;) total = total * z + coefficients[n];
  return total;
}

// Signed inverse factorials of every second number from `first` on; times the power where it is the derivative.
template <size_t size>
constexpr std::array<double, size> inverse_factorials(int first, bool slope) {
  std::array<double, size> result{};
  double factorial = 1, sign = 1;
  size_t n = 0;
  for (int k = 1; n < size + (slope ? 1 : 0); ++k) {
    if (k > 1) factorial *= k;
    if (k < first || (k - first) % 2) continue;
    if (!slope) result[n] = sign / factorial;
    if (slope && n > 0) result[n - 1] = sign * static_cast<double>(n) / factorial;
    sign = -sign;
    ++n;
  }
  return result;
}

template <size_t size>
constexpr std::array<double, size> inverse_odds(bool slope) {
  std::array<double, size> result{};
  for (size_t n = 0; n < size; ++n) {
    const size_t k = slope ? n + 1 : n;
    const double sign = k % 2 ? -1.0 : 1.0;
    result[n] = sign * (slope ? static_cast<double>(k) : 1.0) / static_cast<double>(2 * k + 1);
  }
  return result;
}

// cos(sqrt q) = 1 + q times a series that starts at -1/2!.
constexpr auto cos_series = inverse_factorials<9>(2, false);
constexpr auto sinc_series = inverse_factorials<10>(1, false);
constexpr auto sinc_slope_series = inverse_factorials<9>(1, true);
constexpr auto atan_series = inverse_odds<11>(false);
constexpr auto atan_slope_series = inverse_odds<10>(true);

struct Trig {
  double cos, sinc, sinc_slope;
};

// cos(sqrt q), sin(sqrt q) / sqrt q and the slope of the latter by q.
template <bool slopes>
Trig trig(double q) {
  if (q < trig_series_below) {
    return {1 - q * series(cos_series, q), series(sinc_series, q), slopes ? series(sinc_slope_series, q) : 0};
  }
  const double root = std::sqrt(q), cos = std::cos(root), sinc = std::sin(root) / root;
  return {cos, sinc, slopes ? (cos - sinc) / (2 * q) : 0};
}

struct Factors {
  double cos, sin_ratio, cos_slope = 0, sin_slope = 0;
};

// C and S of y = C x + S w as functions of q = (|w| / |x|)^2, and their derivatives by q where asked for.
template <bool slopes>
Factors factors(double q, const Options& o) {
  Factors f{};
  if (o.kind == Kind::projection) {
    f.cos = f.sin_ratio = 1 / std::sqrt(1 + q);
    f.cos_slope = f.sin_slope = -0.5 * f.cos * f.cos * f.cos;
  } else if (o.kind == Kind::cayley) {
    f.sin_ratio = 1 / (1 + q / 4);
    f.cos = 2 * f.sin_ratio - 1;
    f.sin_slope = -0.25 * f.sin_ratio * f.sin_ratio;
    f.cos_slope = 2 * f.sin_slope;
  } else if (o.kind == Kind::exponential) {
    const Trig t = trig<slopes>(q);
    f = {t.cos, t.sinc, -0.5 * t.sinc, t.sinc_slope};
  } else {
    const double p_square = o.p * o.p, rho = q / p_square, speed = 1 / (1 + rho);
    const bool small = rho < atan_series_below;
    const double root = std::sqrt(rho);
    const double ratio = small ? series(atan_series, rho) : std::atan(root) / root;
    const Trig t = trig<slopes>(q * ratio * ratio);
    f.cos = t.cos;
    f.sin_ratio = ratio * t.sinc;
    if (slopes) {
      const double bend = small ? series(atan_slope_series, rho) : (speed - ratio) / (2 * rho);
      f.cos_slope = -0.5 * f.sin_ratio * speed;
      f.sin_slope = bend / p_square * t.sinc + ratio * ratio * speed * t.sinc_slope;
    }
  }
  if (o.clamp && q > o.limit_square) {
    f.cos = o.cos_max;
    f.sin_ratio = o.sin_max / std::sqrt(q);
    f.cos_slope = 0;
    f.sin_slope = -0.5 * f.sin_ratio / q;
  }
  return f;
}

// --- walks over a row ------------------------------------------------------------------------------------------------

// Calls f(start, count, slot) over a row; two slots, so that sums have two independent chains.
template <typename T, typename F>
inline void walk(int64_t dim, F&& f) {
  constexpr int64_t width = Vectorized<T>::size();
  int64_t i = 0;
  for (; i + 2 * width <= dim; i += 2 * width) {
    f(i, width, std::integral_constant<int, 0>{});
    f(i + width, width, std::integral_constant<int, 1>{});
  }
  for (; i < dim; i += width) f(i, std::min(width, dim - i), std::integral_constant<int, 0>{});
}

template <typename T>
inline Vectorized<T> load(const T* from, int64_t count) {
  return count == Vectorized<T>::size() ? Vectorized<T>::loadu(from) : Vectorized<T>::loadu(from, count);
}

template <typename T>
inline void store(const Vectorized<T>& value, T* to, int64_t count) {
  count == Vectorized<T>::size() ? value.store(to) : value.store(to, count);
}

template <typename T>
inline T total(const Vectorized<T> (&sum)[2]) {
  using V = Vectorized<T>;
  return at::vec::vec_reduce_all<T>([](V& a, V& b) { return a + b; }, sum[0] + sum[1]);
}

template <typename T>
inline Vectorized<T> tangent(const Vectorized<T>& x, const Vectorized<T>& u, const Vectorized<T>& minus_ratio) {
  return at::vec::fmadd(minus_ratio, x, u);
}

template <typename T>
T largest(const T* x, int64_t dim) {
  T result = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const T size = std::abs(x[i]);
    if (!(size <= result)) result = size;
    if (std::isnan(size)) return size;
  }
  return result;
}

// What a row comes down to. `scale` is a power of two that x and u were divided by, 1 where no square needs it.
template <typename T>
struct Row {
  const T *x, *u;
  double scale = 1, inverse_square = 0, v_square = 0;
  T ratio = 0;        // what has to be taken from u: v = u - ratio x
  double taken = 0;   // what was taken from u before
  T g_x = 0, g_v = 0;
  bool empty = false;
};

// Sums of a row; with a gradient g, those with it too. False if a square may have left the range of T.
template <typename T, bool gradient>
bool sums(Row<T>& row, const T* g, int64_t dim) {
  using V = Vectorized<T>;
  V xx[2]{V(0), V(0)}, xu[2]{V(0), V(0)};
  walk<T>(dim, [&](int64_t i, int64_t count, auto slot) {
    const V x = load(row.x + i, count), u = load(row.u + i, count);
    xx[slot] = at::vec::fmadd(x, x, xx[slot]);
    xu[slot] = at::vec::fmadd(x, u, xu[slot]);
  });
  const double square = total(xx), dot = total(xu);
  row.inverse_square = square == 0 ? 0 : 1 / square;
  row.ratio = static_cast<T>(dot * row.inverse_square);
  const V minus_ratio(-row.ratio);
  V vv[2]{V(0), V(0)}, gx[2]{V(0), V(0)}, gv[2]{V(0), V(0)};
  walk<T>(dim, [&](int64_t i, int64_t count, auto slot) {
    const V x = load(row.x + i, count), v = tangent(x, load(row.u + i, count), minus_ratio);
    vv[slot] = at::vec::fmadd(v, v, vv[slot]);
    if constexpr (gradient) {
      const V now = load(g + i, count);
      gx[slot] = at::vec::fmadd(now, x, gx[slot]);
      gv[slot] = at::vec::fmadd(now, v, gv[slot]);
    }
  });
  row.v_square = total(vv);
  if (gradient) {
    row.g_x = total(gx);
    row.g_v = total(gv);
  }
  constexpr double limit = std::is_same_v<T, float> ? 0x1p96 : 0x1p768;
  return square < limit && square > 1 / limit && std::abs(dot) < limit && row.v_square < limit;
}

// Where u has a long part along x, its rounding is left in v: v takes the place of u and is projected itself.
template <typename T, bool gradient>
void project_again(Row<T>& row, const T* g, int64_t dim, T* spare_u) {
  using V = Vectorized<T>;
  if (!(std::abs(row.ratio) > project_again_above)) return;
  const V minus_ratio(-row.ratio);
  walk<T>(dim, [&](int64_t i, int64_t count, auto) {
    store(tangent(load(row.x + i, count), load(row.u + i, count), minus_ratio), spare_u + i, count);
  });
  row.u = spare_u;
  row.taken = row.ratio;
  sums<T, gradient>(row, g, dim);
}

template <typename T, bool gradient>
Row<T> reduce(const T* x, const T* u, const T* g, int64_t dim, T* spare_x, T* spare_u) {
  Row<T> row{x, u};
  if (sums<T, gradient>(row, g, dim)) {
    project_again<T, gradient>(row, g, dim, spare_u);
    return row;
  }
  const T size = largest(x, dim);
  row.empty = size == 0;
  if (row.empty) return row;
  if (std::isfinite(size)) {
    // A power of two changes no digit; the smallest normal number stands in for those below it.
    row.scale = std::max<double>(std::exp2(std::ilogb(size)), std::numeric_limits<T>::min());
    for (int64_t i = 0; i < dim; ++i) {
      spare_x[i] = static_cast<T>(x[i] / row.scale);
      spare_u[i] = static_cast<T>(u[i] / row.scale);
    }
    row.x = spare_x;
    row.u = spare_u;
    sums<T, gradient>(row, g, dim);
    project_again<T, gradient>(row, g, dim, spare_u);
  }
  return row;
}

// --- rows of any dtype -----------------------------------------------------------------------------------------------

template <typename S, typename T>
void widen(const S* from, T* to, int64_t dim) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, float> && c10::is_reduced_floating_point_v<S>) {
    constexpr int64_t width = Vectorized<S>::size();
    for (; i + width <= dim; i += width) {
      auto [low, high] = at::vec::convert_to_float<S>(Vectorized<S>::loadu(from + i));
      low.store(to + i);
      high.store(to + i + width / 2);
    }
  }
  for (; i < dim; ++i) to[i] = static_cast<T>(from[i]);
}

template <typename S, typename T>
void narrow(const T* from, S* to, int64_t dim) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, float> && c10::is_reduced_floating_point_v<S>) {
    constexpr int64_t width = Vectorized<S>::size();
    for (; i + width <= dim; i += width) {
      at::vec::convert_from_float<S>(Vectorized<float>::loadu(from + i), Vectorized<float>::loadu(from + i + width / 2))
          .store(to + i);
    }
  }
  for (; i < dim; ++i) to[i] = static_cast<S>(from[i]);
}

template <typename F>
void with_dtype(at::ScalarType dtype, F&& f) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "geonorm::sphere_step_cpp",
                                  [&] { f(static_cast<const scalar_t*>(nullptr)); });
}

// Rows of a tensor, as T: where they lie, or in `spare` after a conversion.
template <typename T>
struct Input {
  Tensor rows;
  at::ScalarType dtype;
  const char* data;
  int64_t dim, stride;

  explicit Input(const Tensor& value) : dtype(value.scalar_type()), dim(value.size(-1)) {
    rows = value.reshape({-1, dim});
    if (dim > 1 && rows.stride(1) != 1) rows = rows.contiguous();
    data = static_cast<const char*>(rows.const_data_ptr());
    stride = rows.stride(0) * static_cast<int64_t>(rows.element_size());
  }

  const T* row(int64_t index, T* spare) const {
    const char* start = data + index * stride;
    if (dtype == c10::CppTypeToScalarType<T>::value) return reinterpret_cast<const T*>(start);
    with_dtype(dtype, [&](auto* type) { widen(reinterpret_cast<decltype(type)>(start), spare, dim); });
    return spare;
  }
};

template <typename T>
struct Output {
  at::ScalarType dtype;
  char* data;
  int64_t dim, stride;

  explicit Output(const Tensor& value)
      : dtype(value.scalar_type()),
        data(static_cast<char*>(value.mutable_data_ptr())),
        dim(value.dim() ? value.size(-1) : 1),
        stride(dim * static_cast<int64_t>(value.element_size())) {}

  T* row(int64_t index, T* spare) const {
    return dtype == c10::CppTypeToScalarType<T>::value ? reinterpret_cast<T*>(data + index * stride) : spare;
  }

  void finish(int64_t index, const T* spare) const {
    if (dtype == c10::CppTypeToScalarType<T>::value) return;
    with_dtype(dtype, [&](auto* type) {
      using S = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      narrow(spare, reinterpret_cast<S*>(data + index * stride), dim);
    });
  }
};

// Calls f(row, scratch) for every row, a share of them in each thread; scratch holds `spares` rows.
template <typename T, typename F>
void for_rows(int64_t rows, int64_t dim, int64_t spares, F&& f) {
  const int64_t grain = std::max<int64_t>(1, at::internal::GRAIN_SIZE / std::max<int64_t>(1, dim));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<T> scratch(static_cast<size_t>(spares * dim));
    for (int64_t index = begin; index < end; ++index) f(index, scratch.data());
  });
}

// --- forward ---------------------------------------------------------------------------------------------------------

template <typename T>
void forward_rows(const Tensor& x_all, const Tensor& u_all, const Tensor& y_all, const Options& o) {
  using V = Vectorized<T>;
  const Input<T> xs(x_all), us(u_all);
  const Output<T> ys(y_all);
  const int64_t dim = xs.dim;
  for_rows<T>(xs.rows.size(0), dim, 5, [&](int64_t index, T* scratch) {
    T* y = ys.row(index, scratch + 4 * dim);
    const Row<T> row = reduce<T, false>(xs.row(index, scratch), us.row(index, scratch + dim), nullptr, dim,
                                        scratch + 2 * dim, scratch + 3 * dim);
    if (row.empty) {
      std::fill(y, y + dim, T(0));
      return ys.finish(index, y);
    }
    const Factors f = factors<false>(o.alpha * o.alpha * row.v_square * row.inverse_square, o);
    const double resize = o.resize ? o.radius * std::sqrt(row.inverse_square) : 1;
    const V cos(static_cast<T>(f.cos * resize)), gain(static_cast<T>(o.alpha * f.sin_ratio * resize));
    const V minus_ratio(-row.ratio), scale(static_cast<T>(o.resize ? 1 : row.scale));
    walk<T>(dim, [&](int64_t i, int64_t count, auto) {
      const V x = load(row.x + i, count);
      store(at::vec::fmadd(gain, tangent(x, load(row.u + i, count), minus_ratio), cos * x) * scale, y + i, count);
    });
    ys.finish(index, y);
  });
}

// --- backward --------------------------------------------------------------------------------------------------------

template <typename T>
void backward_rows(const Tensor& g_all, const Tensor& x_all, const Tensor& u_all, const Tensor& grad_x_all,
                   const Tensor& grad_u_all, double* by_alpha, bool need_x, bool need_u, const Options& o) {
  using V = Vectorized<T>;
  const Input<T> gs(g_all), xs(x_all), us(u_all);
  const Output<T> grads_x(grad_x_all), grads_u(grad_u_all);
  const int64_t dim = xs.dim;
  for_rows<T>(xs.rows.size(0), dim, 7, [&](int64_t index, T* scratch) {
    T* grad_x = need_x ? grads_x.row(index, scratch + 5 * dim) : nullptr;
    T* grad_u = need_u ? grads_u.row(index, scratch + 6 * dim) : nullptr;
    const T* g_now = gs.row(index, scratch + 4 * dim);
    const Row<T> row = reduce<T, true>(xs.row(index, scratch), us.row(index, scratch + dim), g_now, dim,
                                       scratch + 2 * dim, scratch + 3 * dim);
    const double a = o.alpha, q = row.empty ? 0 : a * a * row.v_square * row.inverse_square;
    const Factors f = factors<true>(q, o);
    const double resize = o.resize ? o.radius * std::sqrt(row.inverse_square) / row.scale : 1;
    const double g_x = row.g_x * resize, g_v = row.g_v * resize;
    const double slope = f.cos_slope * g_x + a * f.sin_slope * g_v;
    if (by_alpha) {
      by_alpha[index] =
          row.empty ? 0 : (f.sin_ratio * g_v + 2 * a * slope * row.v_square * row.inverse_square) * row.scale;
    }
    if (row.empty) {
      if (need_x) std::fill(grad_x, grad_x + dim, T(0));
      if (need_u) std::fill(grad_u, grad_u + dim, T(0));
    } else {
      const double gain = a * f.sin_ratio;
      const double outward = 2 * slope * q + (o.resize ? f.cos * g_x + gain * g_v : 0);
      const V u_by_g(static_cast<T>(gain * resize)), x_by_g(static_cast<T>(f.cos * resize)), minus_ratio(-row.ratio);
      const V minus_along_u(static_cast<T>(-(row.taken + row.ratio)));
      const V across(static_cast<T>(2 * a * a * slope * row.inverse_square));
      const V minus_along(static_cast<T>(-gain * g_x * row.inverse_square));
      const V minus_outward(static_cast<T>(-outward * row.inverse_square));
      const auto write = [&](auto with_x, auto with_u) {
        walk<T>(dim, [&](int64_t i, int64_t count, auto) {
          const V x = load(row.x + i, count), g = load(g_now + i, count);
          const V v = tangent(x, load(row.u + i, count), minus_ratio);
          const V by_u = at::vec::fmadd(minus_along, x, at::vec::fmadd(across, v, u_by_g * g));
          if constexpr (with_u) store(by_u, grad_u + i, count);
          if constexpr (with_x) {
            const V by_x = at::vec::fmadd(minus_along, v, at::vec::fmadd(minus_along_u, by_u, x_by_g * g));
            store(at::vec::fmadd(minus_outward, x, by_x), grad_x + i, count);
          }
        });
      };
      if (need_x && need_u) write(std::true_type{}, std::true_type{});
      if (need_x && !need_u) write(std::true_type{}, std::false_type{});
      if (!need_x && need_u) write(std::false_type{}, std::true_type{});
    }
    if (need_x) grads_x.finish(index, grad_x);
    if (need_u) grads_u.finish(index, grad_u);
  });
}

// --- the operations --------------------------------------------------------------------------------------------------

// PyTorch hands a tensor with a forward tangent on to an operation that has no formula for it, and drops the tangent.
void refuse_tangent(const Tensor& value) {
  TORCH_CHECK(!value._fw_grad(0).defined(),
              "an operation below geonorm.sphere_step has no forward-mode derivative; geonorm.sphere_step has");
}

bool in_double(const Tensor& x, const Tensor& u) {
  return x.scalar_type() == at::kDouble || u.scalar_type() == at::kDouble;
}

Tensor empty_rows(const Tensor& like) { return at::empty_like(like, at::MemoryFormat::Contiguous); }

Tensor step_forward(const Tensor& x, const Tensor& u, const std::optional<Tensor>& alpha, double step, double exponent,
                    std::optional<double> max_angle, std::optional<double> radius) {
  for (const Tensor& value : {x, u, alpha.value_or(x)}) refuse_tangent(value);
  Tensor y = empty_rows(x);
  if (x.numel() == 0) return y;
  const Options options(alpha, step, exponent, max_angle, radius);
  in_double(x, u) ? forward_rows<double>(x, u, y, options) : forward_rows<float>(x, u, y, options);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> step_backward(const Tensor& g, const Tensor& x, const Tensor& u,
                                                 const std::optional<Tensor>& alpha, double step, double exponent,
                                                 std::optional<double> max_angle, std::optional<double> radius,
                                                 c10::List<bool> needs) {
  for (const Tensor& value : {g, x, u, alpha.value_or(x)}) refuse_tangent(value);
  const bool need_x = needs.get(0), need_u = needs.get(1), need_alpha = needs.get(2) && alpha.has_value();
  const Tensor none = at::empty({0}, x.options());
  Tensor grad_x = need_x ? empty_rows(x) : none, grad_u = need_u ? empty_rows(u) : at::empty({0}, x.options());
  Tensor grad_alpha = need_alpha ? at::zeros_like(*alpha, at::MemoryFormat::Contiguous) : at::empty({0}, x.options());
  if (x.numel() == 0 || !(need_x || need_u || need_alpha)) return {grad_x, grad_u, grad_alpha};
  const Options options(alpha, step, exponent, max_angle, radius);
  // One number a row, added up in order afterwards: the sum does not depend on the number of threads.
  std::vector<double> by_alpha(need_alpha ? static_cast<size_t>(x.numel() / x.size(-1)) : 0);
  double* parts = need_alpha ? by_alpha.data() : nullptr;
  if (in_double(x, u)) {
    backward_rows<double>(g, x, u, grad_x, grad_u, parts, need_x, need_u, options);
  } else {
    backward_rows<float>(g, x, u, grad_x, grad_u, parts, need_x, need_u, options);
  }
  if (need_alpha) {
    double sum = 0;
    for (const double part : by_alpha) sum += part;
    grad_alpha.fill_(sum);
  }
  return {grad_x, grad_u, grad_alpha};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(geonorm, library) {
  library.def(
      "sphere_step_cpp(Tensor x, Tensor u, Tensor? alpha, float step, float exponent, float? max_angle, "
      "float? radius) -> Tensor");
  library.def(
      "sphere_step_cpp_backward(Tensor g, Tensor x, Tensor u, Tensor? alpha, float step, float exponent, "
      "float? max_angle, float? radius, bool[] needs) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(geonorm, CPU, library) {
  library.impl("sphere_step_cpp", &step_forward);
  library.impl("sphere_step_cpp_backward", &step_backward);
}
