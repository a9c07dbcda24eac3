"""What an exercise may name: gpukit.grading.lint refuses everything else.

Whatever only computes may be added: a method or an attribute to TENSOR or VALUES, a function to its module in MODULES.
`python -m pytest tests/grading/test_lint.py` says whether a new name leads further than that.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- attributes of values -----------------------------------------------------------------------------------------

# Of tensors; each may end in an underscore, as add_ does.
TENSOR = _names("""
    H T abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all allclose amax amin aminmax angle any
    arccos arcsin arctan arctan2 argmax argmin argsort argwhere as_strided as_strided_scatter asin asinh atan atan2 atanh
    backward baddbmm bernoulli bfloat16 bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor bmm bool broadcast_to byte cdouble ceil cfloat chalf char cholesky cholesky_inverse cholesky_solve chunk
    clamp clamp_max clamp_min clip clone conj conj_physical contiguous copy copysign corrcoef cos cosh count_nonzero cov cpu
    cross cummax cummin cumprod cumsum data data_ptr deg2rad det detach device diag diag_embed diagflat diagonal
    diagonal_scatter diff digamma dim dist div divide dot double dsplit dtype element_size eq equal erf erfc erfinv exp exp2
    expand expand_as expm1 exponential fill fill_diagonal fix flatten flip fliplr flipud float float_power floor
    floor_divide fmax fmin fmod frac frexp gather gcd ge get_device grad grad_fn greater greater_equal gt half hardshrink
    heaviside histc histogram hsplit hypot i0 igamma igammac imag index index_add index_copy index_fill index_put
    index_reduce index_select inner int inverse is_complex is_conj is_contiguous is_cpu is_cuda is_floating_point is_leaf
    is_meta is_neg is_nonzero is_same_size is_signed isclose isfinite isinf isnan isneginf isposinf isreal item itemsize
    kron kthvalue layout lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2
    logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logsumexp long lt mH mT masked_fill
    masked_scatter masked_select matmul matrix_exp matrix_power max maximum mean median min minimum mm mode moveaxis movedim
    msort mul multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow nbytes ndim ndimension
    ne neg negative nelement new_empty new_empty_strided new_full new_ones new_tensor new_zeros nextafter nonzero norm
    normal not_equal numel outer permute polygamma positive pow prelu prod put qr quantile rad2deg random ravel real
    reciprocal relu remainder repeat repeat_interleave requires_grad reshape reshape_as resolve_conj resolve_neg retain_grad
    retains_grad roll rot90 round rsqrt scatter scatter_add scatter_reduce select select_scatter sgn shape short sigmoid
    sign signbit sin sinc sinh size slice_scatter slogdet softmax sort split split_with_sizes sqrt square squeeze std
    storage_offset stride sub subtract sum sum_to_size svd swapaxes swapdims t take take_along_dim tan tanh tensor_split
    tile to tolist topk trace transpose tril triu true_divide trunc type type_as unbind unflatten unfold uniform unique
    unique_consecutive unsqueeze values var vdot view view_as vsplit where xlogy zero
""")

# Of numbers, strings, containers, arrays, generators of random numbers, fractions and decimals;
VALUES = _names("""
    T abbr accumulate add adjusted append appendleft argpartition args as_integer_ratio as_tuple astype at beta betavariate
    binomial bit_count bit_length bits byteswap cache_clear cache_info canonical capitalize casefold cdf center choice
    choices choose clear clip clone_state close compare compare_signal compare_total compare_total_mag compress conjugate
    copy copy_abs copy_negate copy_sign count decode default_factory denominator device difference difference_update discard
    dot dtype elements encode endswith eps exp expandtabs exponential expovariate extend extendleft fill find flat fma
    from_bytes from_decimal from_float from_iterable from_samples fromhex fromkeys func gamma gammavariate gauss get getrandbits getstate
    hex imag index indices initial_seed insert integers intersection intersection_update inv_cdf is_canonical is_complex
    is_finite is_floating_point is_infinite is_integer is_nan is_normal is_qnan is_signed is_snan is_subnormal is_zero
    isalnum isalpha isascii isdecimal isdigit isdisjoint isidentifier islower isnumeric isprintable isspace issubset
    issuperset istitle isupper items itemsize iter_unpack join keys keywords limit_denominator ljust ln log10 logb
    logical_and logical_invert logical_or logical_xor lognormvariate lower lstrip maketrans manual_seed maps max max_mag
    maxlen mean median min min_mag mode most_common move_to_end multinomial multivariate_normal name nbytes new_child
    next_minus next_plus next_toward nin nonzero normal normalize normalvariate nout number_class numel numerator outer
    overlap pack pack_into parents paretovariate partition pdf permutation permuted poisson pop popitem popleft prec put
    quantiles quantize radix rand randbytes randint randn random random_sample randrange real reduce reduceat remainder_near
    remove removeprefix removesuffix replace resolution reverse rfind rindex rjust rotate rounding rpartition rsplit rstrip
    same_quantum sample samples scaleb searchsorted seed send setdefault setstate shift shuffle size smallest_normal sort
    split splitlines sqrt standard_exponential standard_gamma standard_normal start startswith stdev step stop strides strip
    subtract swapcase symmetric_difference symmetric_difference_update take tiny title to_bytes to_complex to_eng_string
    to_integral to_integral_exact to_integral_value to_real tobytes total translate triangular type uniform union unpack
    unpack_from update upper value values variance vonmisesvariate weibullvariate year zfill zscore
""")

# of modules of torch.nn, optimizers, autograd's functions, and what the GPU says of itself;
VALUES |= _names("""
    add_module apply backward bfloat16 bias bmm buffers children cpu double elapsed_time embed_dim embedding_dim eval
    extra_repr float forward grad_fn half head_dim hidden_size in_channels
    in_features in_proj_weight is_bf16_supported jvp kernel_size layers linear1 linear2 load_state_dict major mark_dirty
    mark_non_differentiable max_memory_allocated minor modules momentum multi_processor_count named_buffers named_children
    named_modules named_parameters needs_input_grad norm1 norm2 normalized_shape num_embeddings num_heads out_channels
    out_features out_proj padding param_groups parameters query record register_buffer register_module register_parameter
    requires_grad_ running_mean running_var save_for_backward save_for_forward saved_tensors self_attn set_materialize_grads
    setup_context state state_dict stride synchronize to total_memory train training vjp wait weight zero_grad
""")

# of blocks, pointers, descriptors and types in a kernel, and of configurations;
VALUES |= _names("""
    ALL NONE advance all_kwargs associative_scan atomic_add atomic_and atomic_cas atomic_max atomic_min atomic_or
    atomic_xchg atomic_xor base block_shape block_type cast cdiv element_ty exponent_bias fp_mantissa_width gather
    get_block_shapes get_int_max_value get_int_min_value histogram int_bitwidth int_signedness is_bf16 is_block is_bool
    is_const is_dtype is_floating is_fp16 is_fp32 is_fp64 is_fp8 is_fp8e4b15 is_fp8e4b8 is_fp8e4nv is_fp8e5 is_fp8e5b16
    is_int is_int1 is_int16 is_int32 is_int64 is_int8 is_int_signed is_int_unsigned is_ptr is_standard_floating is_uint16
    is_uint32 is_uint64 is_uint8 is_void kwargs load logical_and logical_or nbytes num_ctas num_stages num_warps numel
    padding primitive_bitwidth ravel reduce reduce_or scalar scatter shape store strides trans warmup with_element_ty
    xor_sum
""")

# of what exercises hand to a function.
VALUES |= _names("""
    clock elapsed_us event flush_l2 options p params programs settings steps synchronize weight_decays zeros
""")

# Dunder and other underscored names that may be read of anything. Methods are for Python to call: a library class's own would
# take any object in place of self.
UNDERSCORED = _names("__name__ __doc__ __init__ __qualname__ __version__ _replace _asdict _make _fields")

# Methods that a class may define: what Python calls when it computes.
METHODS = frozenset(
    f"__{name}__"
    for name in (
        "init post_init call len getitem setitem delitem contains iter next reversed bool int float index complex str repr "
        "hash eq ne lt le gt ge add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor neg pos abs invert "
        "radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor iadd isub imul imatmul "
        "itruediv ifloordiv imod ipow ilshift irshift iand ior ixor round trunc floor ceil enter exit missing slots"
    ).split()
)

# Methods from which modules in a list take the text that names an attribute.
LOOKUPS = _names("_get_abs_string_index _get_item_by_idx")

# Never, also where the file defines such a name itself: frames, code, what lies under a tensor or a block, attributes by text.
NEVER = _names("""
    gi_frame gi_code gi_yieldfrom cr_frame cr_code cr_await ag_frame ag_code f_back f_globals f_locals f_builtins f_code f_trace
    tb_frame tb_next co_code co_consts co_names mro handle storage untyped_storage _typed_storage set_ apply_ map_ map2_ resize_ ctypes tofile
    register_hook format_map builtins os sys get_buffer get_parameter get_submodule set_submodule
""")
NEVER |= LOOKUPS

# ---- builtins -----------------------------------------------------------------------------------------------------

BUILTINS = _names("""
    ArithmeticError AssertionError AttributeError BaseException Ellipsis Exception False FloatingPointError GeneratorExit ImportError IndexError KeyError
    KeyboardInterrupt LookupError MemoryError NameError None NotImplemented NotImplementedError OSError OverflowError
    RecursionError RuntimeError RuntimeWarning StopIteration SyntaxError SystemExit TimeoutError True TypeError UnicodeError UserWarning ValueError Warning
    ZeroDivisionError __debug__ abs all any ascii bin bool bytearray bytes callable chr classmethod complex dict divmod enumerate
    filter float format frozenset getattr hasattr hash hex id int isinstance issubclass iter len list map max min next object oct
    ord pow print property range repr reversed round set slice sorted staticmethod str sum super tuple type zip
""")

# ---- modules ------------------------------------------------------------------------------------------------------

_TORCH = (TENSOR - {"cpu"}) | _names("""
    BoolTensor FloatTensor Generator HalfTensor IntTensor LongTensor Size Tensor adaptive_avg_pool1d adaptive_max_pool1d
    alpha_dropout arange as_tensor asarray atleast_1d atleast_2d atleast_3d autocast avg_pool1d batch_norm bilinear
    binary_cross_entropy_with_logits block_diag broadcast_shapes broadcast_tensors bucketize can_cast cartesian_prod cat
    cdist celu channel_shuffle channels_last column_stack combinations complex complex128 complex64 concat concatenate
    constant_pad_nd contiguous_format conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cosine_similarity cumulative_trapezoid dropout dstack e einsum embedding embedding_bag empty empty_like empty_permuted
    empty_strided enable_grad eye finfo float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    float8_e8m0fnu frobenius_norm from_numpy full full_like get_default_dtype gradient group_norm hstack iinfo inf
    inference_mode instance_norm int16 int32 int64 int8 is_grad_enabled is_tensor isin kl_div layer_norm linspace logspace
    manual_seed margin_ranking_loss max_pool1d max_pool1d_with_indices max_pool2d max_pool3d memory_format meshgrid nan
    native_group_norm native_layer_norm newaxis no_grad ones ones_like pairwise_distance pdist pi pixel_shuffle
    pixel_unshuffle poisson poisson_nll_loss polar preserve_format promote_types rand rand_like randint randint_like randn
    randn_like randperm range result_type rms_norm rrelu rsub scalar_tensor searchsorted seed selu set_grad_enabled stack
    std_mean strided tensor tensordot threshold trapezoid trapz tril_indices triplet_margin_loss triu_indices uint16 uint32
    uint64 uint8 unravel_index vander var_mean view_as_complex view_as_real view_copy vmap vstack zeros zeros_like
""")
_FUNCTIONAL = (_TORCH - {"grad"}) | _names("""
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d_with_indices adaptive_max_pool2d
    adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices affine_grid avg_pool2d avg_pool3d
    binary_cross_entropy conv_tbc cosine_embedding_loss cross_entropy ctc_loss dropout1d dropout2d dropout3d elu
    feature_alpha_dropout fold fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices gaussian_nll_loss gelu glu grid_sample grouped_mm gumbel_softmax hardsigmoid
    hardswish hardtanh hinge_embedding_loss huber_loss interpolate l1_loss leaky_relu linear linear_cross_entropy
    local_response_norm logsigmoid lp_pool1d lp_pool2d lp_pool3d max_pool2d_with_indices max_pool3d_with_indices
    max_unpool1d max_unpool2d max_unpool3d mish mse_loss multi_head_attention_forward multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss native_channel_shuffle nll_loss normalize one_hot pad relu6
    scaled_dot_product_attention scaled_grouped_mm scaled_mm silu smooth_l1_loss soft_margin_loss softmin softplus
    softshrink softsign tanhshrink triplet_margin_with_distance_loss upsample upsample_bilinear upsample_nearest
""")
_NN = _names("""
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss BatchNorm1d BatchNorm2d
    BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d
    ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss CosineSimilarity
    CrossEntropyLoss Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold
    FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRUCell GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish
    Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d
    LPPool2d LPPool3d LSTMCell LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d
    LazyConv3d LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d
    LazyInstanceNorm3d LazyLinear LeakyReLU Linear LinearCrossEntropyLoss LocalResponseNorm LogSigmoid LogSoftmax MSELoss
    MarginRankingLoss MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish Module ModuleDict ModuleList
    MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss MultiheadAttention NLLLoss PReLU PairwiseDistance
    Parameter PixelShuffle PixelUnshuffle PoissonNLLLoss RMSNorm RNNCell RNNCellBase
    RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU
    Sequential SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign Tanh
    Tanhshrink Threshold Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer
    TripletMarginLoss TripletMarginWithDistanceLoss Unflatten Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d
    ZeroPad1d ZeroPad2d ZeroPad3d
""")
_TRITON_LANGUAGE = _names("""
    PropagateNan TRITON_MAX_TENSOR_NUMEL abs add advance arange argmax argmin associative_scan assume atomic_add atomic_and
    atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor bfloat16 bitonic_merge block_type broadcast
    broadcast_to cast cat cdiv ceil clamp condition const constexpr constexpr_type cos cumprod cumsum debug_barrier
    device_assert device_print div_rn dot dot_scaled dtype erf exp exp2 expand_dims fdiv flip float16 float32 float64
    float8e4b15 float8e4b8 float8e4nv float8e5 float8e5b16 floor fma full gather histogram inline_asm_elementwise int1 int16 int32 int64 int8
    interleave join load load_tensor_descriptor log log2 make_block_ptr make_tensor_descriptor map_elementwise max
    max_constancy max_contiguous maximum min minimum mul multiple_of num_programs pair_uniform_to_normal permute philox
    philox_impl pi32_t pointer_type program_id rand rand4x randint randint4x randn randn4x range ravel reduce reduce_or
    reshape rsqrt sigmoid sin slice softmax sort split sqrt sqrt_rn squeeze static_assert static_print static_range store
    store_tensor_descriptor sub sum swizzle2d tensor tensor_descriptor to_tensor topk trans tuple uint16 uint32 uint64 uint8
    uint_to_uniform_float umulhi unsqueeze view void where xor_sum zeros zeros_like
""")
_LIBDEVICE = _names("""
    abs acos acosh add_rd add_rn add_ru add_rz asin asinh atan atan2 atanh brev byte_perm cbrt ceil clz copysign cos cosh
    cospi cyl_bessel_i0 cyl_bessel_i1 div_rd div_rn div_ru div_rz double2float_rd double2float_rn double2float_ru
    double2float_rz double2hiint double2int_rd double2int_rn double2int_ru double2int_rz double2ll_rd double2ll_rn
    double2ll_ru double2ll_rz double2loint double2uint_rd double2uint_rn double2uint_ru double2uint_rz double2ull_rd
    double2ull_rn double2ull_ru double2ull_rz double_as_longlong erf erfc erfcinv erfcx erfinv exp exp10 exp2 expm1
    fast_cosf fast_dividef fast_exp10f fast_expf fast_log10f fast_log2f fast_logf fast_powf fast_sinf fast_tanf fast_tanhf
    fdim ffs finitef float2int_rd float2int_rn float2int_ru float2int_rz float2ll_rd float2ll_rn float2ll_ru float2ll_rz
    float2uint_rd float2uint_rn float2uint_ru float2uint_rz float2ull_rd float2ull_rn float2ull_ru float2ull_rz float_as_int
    float_as_uint floor fma fma_rd fma_rn fma_ru fma_rz fmod hadd hiloint2double hypot ilogb int2double_rn int2float_rd
    int2float_rn int2float_ru int2float_rz int_as_float isfinited isinf isnan j0 j1 jn ldexp lgamma ll2double_rd
    ll2double_rn ll2double_ru ll2double_rz ll2float_rd ll2float_rn ll2float_ru ll2float_rz llrint llround log log10 log1p
    log2 logb longlong_as_double mul24 mul_rd mul_rn mul_ru mul_rz mulhi nearbyint nextafter norm3d norm4d normcdf
    normcdfinv popc pow rcbrt rcp64h rcp_rd rcp_rn rcp_ru rcp_rz remainder rhadd rhypot rint rnorm3d rnorm4d round rsqrt
    rsqrt_rn sad saturatef scalbn signbit sin sinh sinpi sqrt sqrt_rd sqrt_rn sqrt_ru sqrt_rz sub_rd sub_rn sub_ru sub_rz
    tan tanh tgamma trunc uint2double_rn uint2float_rd uint2float_rn uint2float_ru uint2float_rz uint_as_float ull2double_rd
    ull2double_rn ull2double_ru ull2double_rz ull2float_rd ull2float_rn ull2float_ru ull2float_rz y0 y1 yn
""")
_NUMPY = (_TORCH - {"char"}) | _names("""
    False True append apply_along_axis apply_over_axes arccosh arcsinh arctanh argpartition around array array_equal
    array_equiv array_split asanyarray ascontiguousarray asfortranarray astype average bartlett binary_repr bitwise_count
    bitwise_invert blackman block broadcast broadcast_arrays bytes c cbrt choose complexfloating compress conjugate convolve
    copyto correlate cumulative_prod cumulative_sum degrees delete diag_indices diag_indices_from digitize divmod ediff1d
    errstate euler_gamma expand_dims extract fabs fft flatnonzero float128 floating format_float_positional
    format_float_scientific fromfunction fromiter geomspace hamming hanning histogram2d histogram_bin_edges histogramdd
    identity indices insert integer interp intersect1d invert iscomplex iscomplexobj isdtype isfortran isrealobj isscalar
    issubdtype iterable ix kaiser left_shift lexsort linalg longlong mask_indices matrix_transpose matvec mgrid
    min_scalar_type mod modf nanargmax nanargmin nancumprod nancumsum nanmax nanmin nanpercentile nanprod nanstd nanvar
    ndarray ndenumerate ndindex number object ogrid packbits pad partition percentile permute_dims piecewise polyfit polyval
    power ptp put_along_axis r radians ravel_multi_index real_if_close resize right_shift rint rollaxis row_stack s
    setdiff1d setxor1d signedinteger single sort_complex spacing str take_along_axis tri tril_indices_from triu_indices_from
    uint union1d unique_all unique_counts unique_inverse unique_values unpackbits unsignedinteger unstack unwrap vecdot
    vecmat vectorize
""")
_TYPING = _names("""
    Annotated Any Callable ClassVar Collection Container Counter DefaultDict Deque Dict Final FrozenSet Generator Generic Hashable
    ItemsView Iterable Iterator KeysView List Literal Mapping MutableMapping MutableSequence MutableSet NamedTuple Never NewType
    NoReturn NotRequired Optional OrderedDict ParamSpec Protocol Required Reversible Self Sequence Set Sized SupportsAbs
    SupportsFloat SupportsIndex SupportsInt SupportsRound TYPE_CHECKING Text Tuple Type TypeAlias TypeGuard TypeVar TypedDict Union
    ValuesView assert_never assert_type cast final overload runtime_checkable
""")

MODULES: dict[str, frozenset[str]] = {
    "__future__": _names("annotations"),
    "abc": _names("ABC abstractmethod"),
    "bisect": _names("bisect bisect_left bisect_right insort insort_left insort_right"),
    "cmath": _names(
        "acos asin atan cos cosh e exp inf isclose isfinite isinf isnan log log10 nan phase pi polar rect sin sinh sqrt tan tanh tau"
    ),
    "collections": _names("ChainMap Counter OrderedDict UserDict UserList defaultdict deque namedtuple"),
    "collections.abc": _TYPING | _names("Callable"),
    "copy": _names("copy deepcopy"),
    "dataclasses": _names(
        "FrozenInstanceError InitVar KW_ONLY MISSING asdict astuple dataclass field fields is_dataclass replace"
    ),
    "decimal": _names("""
        Context Decimal DivisionByZero Inexact InvalidOperation Overflow ROUND_05UP ROUND_CEILING ROUND_DOWN ROUND_FLOOR
        ROUND_HALF_DOWN ROUND_HALF_EVEN ROUND_HALF_UP ROUND_UP Underflow getcontext localcontext setcontext
    """),
    "einops": _names("einsum pack rearrange reduce repeat unpack"),
    "enum": _names("Enum Flag IntEnum IntFlag StrEnum auto unique"),
    "fractions": _names("Fraction"),
    "functools": _names("cache cached_property cmp_to_key lru_cache partial partialmethod reduce total_ordering"),
    "heapq": _names("heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest"),
    "itertools": _names("""
        accumulate batched chain combinations combinations_with_replacement compress count cycle dropwhile filterfalse groupby islice
        pairwise permutations product repeat starmap takewhile tee zip_longest
    """),
    "math": _names("""
        acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist e erf erfc exp exp2 expm1 fabs factorial
        floor fma fmod frexp fsum gamma gcd hypot inf isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf
        nan nextafter perm pi pow prod radians remainder sin sinh sqrt sumprod tan tanh tau trunc ulp
    """),
    "numbers": _names("Complex Integral Number Rational Real"),
    "numpy": _NUMPY,
    "numpy.fft": _names("fft fft2 fftfreq fftn fftshift ifft ifft2 ifftn ifftshift irfft rfft rfftfreq"),
    "numpy.linalg": _NUMPY
    | _names("cond eig eigh eigvals eigvalsh inv lstsq matrix_norm matrix_rank multi_dot pinv solve vector_norm"),
    "numpy.random": _NUMPY
    | _names("Generator default_rng choice permutation rand randn randint random shuffle standard_normal uniform"),
    "numpy.typing": _names("ArrayLike DTypeLike NDArray"),
    "operator": _names("""
        abs add and_ concat contains countOf eq floordiv ge getitem gt iadd iand iconcat ifloordiv ilshift imatmul imod imul index
        indexOf inv invert ior ipow irshift is_ is_not isub itemgetter itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos
        pow rshift setitem sub truediv truth xor
    """),
    "random": _names("""
        Random betavariate choice choices expovariate gammavariate gauss getrandbits lognormvariate normalvariate randbytes randint
        random randrange sample seed shuffle triangular uniform
    """),
    "statistics": _names("""
        NormalDist StatisticsError correlation covariance fmean geometric_mean harmonic_mean linear_regression mean median
        median_grouped median_high median_low mode multimode pstdev pvariance quantiles stdev variance
    """),
    "string": _names("ascii_letters ascii_lowercase ascii_uppercase digits hexdigits octdigits punctuation"),
    "struct": _names("Struct calcsize error iter_unpack pack pack_into unpack unpack_from"),
    "torch": _TORCH,
    "torch.amp": _names("autocast custom_bwd custom_fwd"),
    "torch.autograd": _names("Function Variable backward enable_grad grad inference_mode no_grad set_grad_enabled"),
    "torch.autograd.function": _names("Function FunctionCtx once_differentiable"),
    "torch.autograd.functional": _names("hessian hvp jacobian jvp vhp vjp"),
    "torch.cuda": _names("""
        Event Stream current_device current_stream device_count get_device_capability get_device_name get_device_properties
        is_available is_bf16_supported manual_seed max_memory_allocated memory_allocated reset_peak_memory_stats stream synchronize
    """),
    "torch.fft": _names(
        "fft fft2 fftfreq fftn fftshift hfft ifft ifft2 ifftn ifftshift ihfft irfft irfft2 irfftn rfft rfft2 rfftfreq rfftn"
    ),
    "torch.func": _names("functional_call grad grad_and_value hessian jacfwd jacrev jvp linearize vjp vmap"),
    "torch.linalg": _TORCH
    | _names("""
        cholesky_ex cond eigh eigvals eigvalsh inv inv_ex lstsq matrix_norm matrix_rank multi_dot pinv qr solve solve_triangular svdvals
        vecdot vector_norm
    """),
    "torch.nn": _NN,
    "torch.nn.functional": _FUNCTIONAL,
    "torch.nn.init": _names(
        "calculate_gain constant_ eye_ kaiming_normal_ kaiming_uniform_ normal_ ones_ trunc_normal_ uniform_ xavier_normal_ xavier_uniform_ zeros_"
    ),
    "torch.nn.parameter": _names("Parameter"),
    "torch.optim": _names("ASGD Adadelta Adagrad Adam AdamW Adamax LBFGS NAdam Optimizer RAdam RMSprop SGD"),
    "torch.random": _names("fork_rng initial_seed manual_seed seed"),
    "torch.special": _TORCH
    | _names("""
        airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
        chebyshev_polynomial_w entr erfcx expit gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0e i1 i1e
        laguerre_polynomial_l legendre_polynomial_p log_ndtr modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
        modified_bessel_k1 multigammaln ndtr ndtri psi scaled_modified_bessel_k0 scaled_modified_bessel_k1
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w spherical_bessel_j0 xlog1py zeta
    """),
    "triton": _names(
        "Config autotune cdiv constexpr_function heuristics jit next_power_of_2 reinterpret set_allocator"
    ),
    "triton.language": _TRITON_LANGUAGE,
    "triton.language.core": _TRITON_LANGUAGE,
    "triton.language.extra": frozenset(),
    "triton.language.extra.cuda": frozenset(),
    "triton.language.extra.cuda.libdevice": _LIBDEVICE,
    "triton.language.extra.libdevice": _LIBDEVICE,
    "triton.language.math": _TRITON_LANGUAGE,
    "triton.language.random": _TRITON_LANGUAGE,
    "triton.language.standard": _TRITON_LANGUAGE,
    "triton.tools": frozenset(),
    "triton.tools.tensor_descriptor": _names("TensorDescriptor"),
    "types": _names("MappingProxyType SimpleNamespace"),
    "typing": _TYPING,
}

# ---- what to use instead ------------------------------------------------------------------------------------------

_FILES = "exercises read and write no files"
_PROCESS = "exercises have nothing to do with the process that they run in"
_NAMES = "write the name out: x.name"
_FRAMES = "frames and code belong to Python, not to an exercise"
_TIME = "no verdict depends on time; device.clock() tells it where an exercise is about time"
_MEMORY = "views, indexing and as_strided() give the same elements"
_PATCH = "the check looks at library code as it is: give what you compute a name of its own"
_DEVICE = "tensors are where the check has put them: use x.device"
_HOOKS = "change the value where it is computed"

INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        "open torch.load torch.save numpy.load numpy.save numpy.loadtxt numpy.memmap numpy.fromfile numpy.savez io pathlib "
        "shutil tempfile glob pickle json csv tofile torch.from_file torch.hub".split(),
        _FILES,
    ),
    **dict.fromkeys(
        "os sys subprocess signal threading multiprocessing concurrent asyncio socket ctypes resource gc atexit exit quit "
        "platform builtins".split(),
        _PROCESS,
    ),
    **dict.fromkeys("time datetime timeit triton.testing torch.profiler torch.utils.benchmark".split(), _TIME),
    **dict.fromkeys(
        "inspect traceback gi_frame cr_frame f_back f_globals f_locals tb_frame __traceback__ __code__ __globals__ "
        "__closure__ dis ast".split(),
        _FRAMES,
    ),
    **dict.fromkeys(
        "setattr delattr operator.attrgetter operator.methodcaller __dict__ vars globals locals dir get_buffer get_parameter "
        "get_submodule set_submodule".split(),
        _NAMES,
    ),
    **dict.fromkeys(
        "storage untyped_storage set_ resize_ memoryview data_ptr_ numpy.frombuffer torch.frombuffer".split(), _MEMORY
    ),
    **dict.fromkeys("cuda torch.cuda.set_device pin_memory mps xpu".split(), _DEVICE),
    **dict.fromkeys(
        "register_hook register_forward_hook register_full_backward_hook register_post_accumulate_grad_hook".split(),
        _HOOKS,
    ),
    **dict.fromkeys("eval exec compile __import__ importlib".split(), "write the code out, or make it a function"),
    **dict.fromkeys("apply_ map_ map2_".split(), "operations on whole tensors do it, or a loop over x.tolist()"),
    **dict.fromkeys(
        "__torch_function__ __torch_dispatch__ __getattr__ __getattribute__ __setattr__ __class_getitem__ "
        "__init_subclass__ __set_name__ __del__ __reduce__ __instancecheck__".split(),
        "define a method or a function with a name of its own, and call it",
    ),
    **dict.fromkeys(
        "functools.wraps functools.update_wrapper".split(), "the function inside a decorator works without it"
    ),
    "functools.singledispatch": "isinstance() tells types apart",
    "__class__": "type(x) says the same",
    "__len__": "len(x) says the same",
    "__getitem__": "x[i] says the same",
    "__call__": "x(...) says the same",
    "__eq__": "x == y says the same",
    "input": "the check calls the function with its arguments",
    "breakpoint": "print(x) shows a value; the check prints it below the verdict",
    "logging": "print(x) shows a value",
    "warnings": "print(x) shows a value; raise ValueError(...) ends the call",
    "re": "str has split, partition and replace",
    "run": "kernel[grid](...) launches a kernel",
    "handle": "a block's elements are read and written by tl operations",
    **dict.fromkeys(
        ("torch.nn.ParameterDict", "torch.nn.ParameterList"),
        "self.name = torch.nn.Parameter(...), a line for each of them",
    ),
    "torch.compile": "the exercise is the kernel itself",
    "torch.jit": "the exercise is the function itself",
    "torch.utils": "write it out: recomputing, for instance, is a call in the backward pass",
    "torch.ops": "torch and torch.nn.functional have the same functions",
    "torch.distributed": "an exercise runs on one device",
    "torch.set_printoptions": "f'{x:.3g}' formats a number",
    "triton.runtime": "@triton.jit, @triton.autotune and kernel[grid](...) are all that a launch takes",
    "triton.compile": "kernel[grid](...) compiles and launches",
    "gpukit": "the exercise is to write it: torch, Triton and arithmetic are enough",
    "solutions": "the exercise is to write it",
    "pandas": "torch and numpy do it",
    "scipy": "torch, torch.special and math have the common functions",
}
