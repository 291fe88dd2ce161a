// What XLA calls: products of weights with few columns, those of experts, and paged tree attention, for CPUs.
#include "attention.h"
#include "product.h"

namespace ffi = xla::ffi;

using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U32 = ffi::Buffer<ffi::U32>;
using Result = ffi::ResultBuffer<ffi::F32>;

namespace {

ffi::Error product_f32(ffi::ThreadPool pool, F32 w, F32 x, Result y) {
  adaserve::multiply(pool, w.typed_data(), x, y->typed_data(), w.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error product_bf16(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> w, F32 x, Result y) {
  const auto* weight = static_cast<const adaserve::BFloat16*>(w.untyped_data());
  adaserve::multiply(pool, weight, x, y->typed_data(), w.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error product_i8(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> w, F32 x, Result y) {
  adaserve::multiply(pool, w.typed_data(), x, y->typed_data(), w.dimensions()[0]);
  return ffi::Error::Success();
}

// Weights of 4 bits: values [outputs, inputs / 2], scales and zeros [outputs, groups] of a power of two inputs.
adaserve::Int4 in_int4(ffi::Buffer<ffi::S8>& w, ffi::Buffer<ffi::F16>& scale, ffi::Buffer<ffi::S8>& zero) {
  const auto* values = static_cast<const uint8_t*>(w.untyped_data());
  const auto* scales = static_cast<const uint16_t*>(scale.untyped_data());
  return {values, scales, zero.typed_data(), __builtin_ctzll(2 * w.dimensions()[1] / scale.dimensions()[1])};
}

ffi::Error product_i4(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F16> scale,
                      ffi::Buffer<ffi::S8> zero, F32 x, Result y) {
  adaserve::multiply(pool, in_int4(w, scale, zero), x, y->typed_data(), w.dimensions()[0]);
  return ffi::Error::Success();
}

ffi::Error grouped_f32(ffi::ThreadPool pool, F32 w, F32 x, S32 sizes, Result y) {
  adaserve::multiply_groups(pool, w.typed_data(), x, sizes, y->typed_data(), w.dimensions()[1]);
  return ffi::Error::Success();
}

ffi::Error grouped_bf16(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> w, F32 x, S32 sizes, Result y) {
  const auto* weight = static_cast<const adaserve::BFloat16*>(w.untyped_data());
  adaserve::multiply_groups(pool, weight, x, sizes, y->typed_data(), w.dimensions()[1]);
  return ffi::Error::Success();
}

ffi::Error grouped_i8(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> w, F32 x, S32 sizes, Result y) {
  adaserve::multiply_groups(pool, w.typed_data(), x, sizes, y->typed_data(), w.dimensions()[1]);
  return ffi::Error::Success();
}

ffi::Error grouped_i4(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> w, ffi::Buffer<ffi::F16> scale,
                      ffi::Buffer<ffi::S8> zero, F32 x, S32 sizes, Result y) {
  const int64_t outputs = w.dimensions()[0] / sizes.dimensions()[0];
  adaserve::multiply_groups(pool, in_int4(w, scale, zero), x, sizes, y->typed_data(), outputs);
  return ffi::Error::Success();
}

}  // namespace

// clang-format off
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_product_f32, product_f32,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_product_bf16, product_bf16,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::BF16>>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_product_i8, product_i8,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::S8>>().Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_product_i4, product_i4,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::F16>>().Arg<ffi::Buffer<ffi::S8>>()
        .Arg<F32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_grouped_f32, grouped_f32,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<F32>().Arg<F32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_grouped_bf16, grouped_bf16,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::BF16>>().Arg<F32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_grouped_i8, grouped_i8,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::S8>>().Arg<F32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_grouped_i4, grouped_i4,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::S8>>().Arg<ffi::Buffer<ffi::F16>>().Arg<ffi::Buffer<ffi::S8>>()
        .Arg<F32>().Arg<S32>().Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_packed_attention, adaserve::packed_attention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<F32>().Arg<F32>().Arg<F32>()             // q, k, v
        .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()  // pools of K and V, extensions of both
        .Arg<S32>().Arg<S32>()                        // page table, context
        .Arg<S32>().Arg<S32>().Arg<U32>().Arg<F32>()  // count, position, bits, sinks
        .Attr<int64_t>("layer").Attr<int64_t>("window").Attr<float>("softcap").Ret<F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(adaserve_beam_attention, adaserve::beam_attention,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
        .Arg<F32>().Arg<F32>().Arg<F32>()             // q, k, v
        .Arg<F32>().Arg<F32>().Arg<F32>().Arg<F32>()  // pools of K and V, extensions of both
        .Arg<S32>().Arg<S32>()                        // page table, context
        .Arg<S32>().Arg<U32>().Arg<F32>()             // first, bits, sinks
        .Attr<int64_t>("layer").Attr<float>("softcap").Ret<F32>());
