// GELU in CUDA C++, beside the Triton kernel of notebook 08: y = x / 2 (1 + tanh(0.79788456 (x + 0.044715 x^3))).
// First with one element per thread, then with 16 bytes per thread, as the loads of Triton's kernel are.
// nvcc -O3 -arch=native -shared -Xcompiler -fPIC fusion.cu -o fusion.so
#include <cuda_bf16.h>

__device__ float gelu(float v) {
    float inner = 0.79788456f * (v + 0.044715f * v * v * v);
    return 0.5f * v * (1.0f + tanhf(inner));
}

template <typename T>
__global__ void gelu_kernel(const T* __restrict__ x, T* __restrict__ y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;  // this thread's element
    if (i < n) {                                                     // the last block hangs over the end
        y[i] = (T)gelu((float)x[i]);
    }
}

template <typename T>
__global__ void gelu_vector_kernel(const T* __restrict__ x, T* __restrict__ y, long long n) {
    constexpr int E = 16 / sizeof(T);  // elements in 16 bytes: 8 of bfloat16, 4 of float
    long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * E;
    if (i + E <= n) {
        alignas(16) T v[E];
        *(uint4*)v = *(const uint4*)(x + i);  // one load instruction
        for (int k = 0; k < E; k++) v[k] = (T)gelu((float)v[k]);
        *(uint4*)(y + i) = *(const uint4*)v;  // one store instruction
    } else {
#pragma unroll 1
        for (; i < n; i++) y[i] = (T)gelu((float)x[i]);  // the end, where fewer than E are left
    }
}

constexpr int THREADS = 256;  // per block

template <typename T>
int launch(const T* x, T* y, long long n, cudaStream_t stream) {
    gelu_kernel<T><<<(n + THREADS - 1) / THREADS, THREADS, 0, stream>>>(x, y, n);
    return cudaGetLastError();
}

template <typename T>
int launch_vector(const T* x, T* y, long long n, cudaStream_t stream) {
    if ((size_t)x % 16 || (size_t)y % 16) return cudaErrorMisalignedAddress;  // a view may begin anywhere
    long long each = THREADS * 16 / sizeof(T);  // elements per block
    gelu_vector_kernel<T><<<(n + each - 1) / each, THREADS, 0, stream>>>(x, y, n);
    return cudaGetLastError();
}

// Plain names, so that Python finds them. They return 0 where the launch succeeded.
using bf16 = __nv_bfloat16;
extern "C" {
int gelu_float32(const float* x, float* y, long long n, cudaStream_t s) { return launch(x, y, n, s); }
int gelu_bfloat16(const bf16* x, bf16* y, long long n, cudaStream_t s) { return launch(x, y, n, s); }
int gelu_vector_float32(const float* x, float* y, long long n, cudaStream_t s) { return launch_vector(x, y, n, s); }
int gelu_vector_bfloat16(const bf16* x, bf16* y, long long n, cudaStream_t s) { return launch_vector(x, y, n, s); }
}
