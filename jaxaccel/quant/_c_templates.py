"""The C functions of the layers. `$X` and `$Y` are types of input and output."""

HEAD = """\
static int32_t saturate(int64_t x) {
  return (int32_t)(x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x);
}

/* Rounds to minus infinity, whatever the compiler does with a negative number. */
static int64_t shift_right(int64_t x, int shift) {
  return x < 0 ? ~(~x >> shift) : x >> shift;
}
"""

SCALE_SINGLE = """
static int32_t rescale(int32_t acc, int32_t m0, int shift) {
  int64_t half = (int64_t)1 << (shift - 1);
  return saturate(shift_right((int64_t)acc * m0 + half, shift));
}
"""

SCALE_DOUBLE = """
static int32_t rescale(int32_t acc, int32_t m0, int shift) {
  int left = shift < 31 ? 31 - shift : 0, right = shift > 31 ? shift - 31 : 0;
  int64_t x = saturate((int64_t)acc * ((int64_t)1 << left));
  int64_t half = right ? (int64_t)1 << (right - 1) : 0;
  x = shift_right(x * m0 + ((int64_t)1 << 30), 31);
  return (int32_t)(x < 0 ? -((half - x) >> right) : (x + half) >> right);
}
"""

# Scales are powers of two: m0 is 2**30, and the product a shift.
SHIFT_ONLY = """
static int32_t rescale(int32_t acc, int shift) {
  if (shift <= 30) return saturate((int64_t)acc * ((int64_t)1 << (30 - shift)));
  return (int32_t)shift_right((int64_t)acc + ((int64_t)1 << (shift - 31)), shift - 30);
}
"""

CLAMP = """
static int32_t clamp(int32_t x, int32_t zero, int32_t lo, int32_t hi) {
  return (x < lo - zero ? lo - zero : x > hi - zero ? hi - zero : x) + zero;
}
"""

CONV_STRUCT = """
/* Height, width and channels of input and output, of the kernel; zero points. */
struct conv {
  int in_h, in_w, in_c, out_h, out_w, out_c, k_h, k_w;
  int stride_h, stride_w, top, left, step_h, step_w, groups, per_channel;
  int32_t x_zero, y_zero, lo, hi;
};
"""

CONV = """
static void conv_$A_$B(const $X *x, $Y *y, const int8_t *kernel, const int32_t *bias,
                       const int32_t *m0, const uint8_t *shift, const struct conv *c) {
  int in_g = c->in_c / c->groups, out_g = c->out_c / c->groups;
  for (int h = 0; h < c->out_h; h++)
    for (int w = 0; w < c->out_w; w++)
      for (int o = 0; o < c->out_c; o++) {
        const int8_t *k = kernel + (int32_t)o * c->k_h * c->k_w * in_g;
        int32_t acc = bias[o];
        for (int i = 0; i < c->k_h; i++)
          for (int j = 0; j < c->k_w; j++, k += in_g) {
            int row = h * c->stride_h - c->top + i * c->step_h;
            int col = w * c->stride_w - c->left + j * c->step_w;
            if (row < 0 || row >= c->in_h || col < 0 || col >= c->in_w) continue;
            const $X *p = x + ((int32_t)row * c->in_w + col) * c->in_c
                          + o / out_g * in_g;
            for (int g = 0; g < in_g; g++) acc += (p[g] - c->x_zero) * k[g];
          }
        int s = c->per_channel ? o : 0;
        *y++ = ($Y)clamp($RESCALE(acc, m0[s], shift[s]), c->y_zero, c->lo, c->hi);
      }
}
"""

AFFINE = """
static void affine_$A_$B(const $X *x, $Y *y, int32_t size, int channels,
                         const int8_t *kernel, const int32_t *bias, int params,
                         const int32_t *m0, const uint8_t *shift, int multipliers,
                         int32_t x_zero, int32_t y_zero, int32_t lo, int32_t hi) {
  for (int32_t i = 0; i < size; i++) {
    int c = i % channels, p = params > 1 ? c : 0, s = multipliers > 1 ? c : 0;
    int32_t acc = (x[i] - x_zero) * kernel[p] + bias[p];
    y[i] = ($Y)clamp($RESCALE(acc, m0[s], shift[s]), y_zero, lo, hi);
  }
}
"""

ADD = """
static void add_$A_$C_$B(const $X *a, const $Z *b, $Y *y, int32_t size,
                         int32_t a_zero, int32_t b_zero, int32_t y_zero,
                         const int32_t m0[3], const uint8_t shift[3], int left,
                         int32_t lo, int32_t hi) {
  for (int32_t i = 0; i < size; i++) {
    int32_t p = (a[i] - a_zero) * ((int32_t)1 << left);
    int32_t q = (b[i] - b_zero) * ((int32_t)1 << left);
    int32_t sum = $RESCALE(p, m0[0], shift[0]) + $RESCALE(q, m0[1], shift[1]);
    y[i] = ($Y)clamp($RESCALE(sum, m0[2], shift[2]), y_zero, lo, hi);
  }
}
"""

POOL_STRUCT = """
struct pool {
  int in_h, in_w, channels, out_h, out_w, k_h, k_w;
  int stride_h, stride_w, top, left;
};
"""

MAX_POOL = """
static void max_pool_$A_$B(const $X *x, $Y *y, const struct pool *p) {
  for (int h = 0; h < p->out_h; h++)
    for (int w = 0; w < p->out_w; w++)
      for (int c = 0; c < p->channels; c++) {
        int32_t best = $LOWEST;
        for (int i = 0; i < p->k_h; i++)
          for (int j = 0; j < p->k_w; j++) {
            int row = h * p->stride_h - p->top + i;
            int col = w * p->stride_w - p->left + j;
            if (row < 0 || row >= p->in_h || col < 0 || col >= p->in_w) continue;
            int32_t v = x[((int32_t)row * p->in_w + col) * p->channels + c];
            if (v > best) best = v;
          }
        *y++ = ($Y)best;
      }
}
"""

AVERAGE_POOL = """
static void average_pool_$A_$B(const $X *x, $Y *y, const struct pool *p,
                               const int32_t *m0, const uint8_t *shift, int varies,
                               int32_t x_zero, int32_t y_zero, int32_t lo,
                               int32_t hi) {
  for (int h = 0; h < p->out_h; h++)
    for (int w = 0; w < p->out_w; w++)
      for (int c = 0; c < p->channels; c++) {
        int32_t sum = 0;
        for (int i = 0; i < p->k_h; i++)
          for (int j = 0; j < p->k_w; j++) {
            int row = h * p->stride_h - p->top + i;
            int col = w * p->stride_w - p->left + j;
            if (row < 0 || row >= p->in_h || col < 0 || col >= p->in_w) continue;
            sum += x[((int32_t)row * p->in_w + col) * p->channels + c] - x_zero;
          }
        int32_t s = varies ? (int32_t)h * p->out_w + w : 0;
        *y++ = ($Y)clamp($RESCALE(sum, m0[s], shift[s]), y_zero, lo, hi);
      }
}
"""

CONCAT = """
/* Copies one part into rows that are `stride` long. */
static void place_$A_$B(const $X *x, $Y *y, int32_t rows, int32_t part,
                        int32_t stride) {
  for (int32_t r = 0; r < rows; r++)
    for (int32_t i = 0; i < part; i++) y[r * stride + i] = x[r * part + i];
}
"""

ARGMAX = """
static void argmax_$A_$B(const $X *x, $Y *y, int32_t rows, int channels) {
  for (int32_t r = 0; r < rows; r++, x += channels) {
    int best = 0;
    for (int c = 1; c < channels; c++)
      if (x[c] > x[best]) best = c;
    y[r] = ($Y)best;
  }
}
"""

LAYERS = {
    "conv": CONV,
    "affine": AFFINE,
    "add": ADD,
    "max_pool": MAX_POOL,
    "average_pool": AVERAGE_POOL,
    "place": CONCAT,
    "argmax": ARGMAX,
}

MAIN = """\
/* Reads images of NET_INPUT_SIZE codes from the standard input until its end, and
   prints a line for each: the output's codes, or with --class the largest's index. */
#include <stdio.h>
#include <string.h>

#include "net.h"

static net_input_t input[NET_INPUT_SIZE];
static net_output_t output[NET_OUTPUT_SIZE];

static int32_t largest(void) {
  int32_t best = 0;
  for (int32_t i = 1; i < NET_OUTPUT_SIZE; i++)
    if (output[i] > output[best]) best = i;
  return NET_OUTPUT_SIZE == 1 && NET_IS_CLASS ? (int32_t)output[0] : best;
}

int main(int argc, char **argv) {
  int only_class = argc > 1 && strcmp(argv[1], "--class") == 0;
  size_t count;
  while ((count = fread(input, sizeof input[0], NET_INPUT_SIZE, stdin)) > 0) {
    if (count < NET_INPUT_SIZE) {
      fprintf(stderr, "the last image is cut off: %lu of %d codes\\n",
              (unsigned long)count, NET_INPUT_SIZE);
      return 1;
    }
    net_run(input, output);
    if (only_class) {
      printf("%ld\\n", (long)largest());
      continue;
    }
    for (int32_t i = 0; i < NET_OUTPUT_SIZE; i++)
      printf("%ld%c", (long)output[i], i + 1 < NET_OUTPUT_SIZE ? ' ' : '\\n');
  }
  return 0;
}
"""
