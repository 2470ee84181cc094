// One token's numbers as small floats, head by head and block by block: kernels/packed/floats.py has the formats.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

enum { NONE = 0, FLOAT = 1, E4M3 = 2, E8M0 = 3 };  // scales of a block, as floats.py counts them
constexpr float LEAST = 1e-6f, HALF = 1.0f / 512;  // the least scale of a block; the smallest e4m3

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// The nearest code of a float with so many bits of exponent and of fraction, ties to the even one; `top` saturates.
uint8_t of_eight(float x, int exponent, int fraction, float top) {
    const uint8_t sign = bits_of(x) >> 31 << 7;
    const int bias = (1 << (exponent - 1)) - 1, shift = 23 - fraction;
    float size = std::fabs(x);
    if (size != size) return sign | 127;
    size = size > top ? top : size;
    if (size < std::ldexp(1.0f, 1 - bias))  // multiples of the smallest one; as many as a whole exponent is the next
        return sign | (uint8_t)std::nearbyint(std::ldexp(size, bias - 1 + fraction));
    uint32_t bits = bits_of(size);
    bits += (1u << (shift - 1)) - 1 + (bits >> shift & 1);
    return sign | (uint8_t)((bits >> shift) - ((uint32_t)(127 - bias) << fraction));
}

uint8_t of_four(float x) {
    const float size = std::fabs(x);
    const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                     (size >= 3.5f) + (size > 5.0f);
    return (uint8_t)(code | (bits_of(x) >> 31 << 3));
}

float e4m3(uint8_t code) {  // without its sign
    const int exponent = code >> 3, fraction = code & 7;
    return exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7) : fraction * HALF;
}

}  // namespace

// x (heads, d) float32, a head `x_stride` numbers behind the one before; codes and scales lie `code_stride` bytes and
// `scale_stride` numbers apart from head to head, a block's scale `group_stride` from the one before. What tokens share
// is shared[head * shared_step].
extern "C" void pack_floats(int64_t heads, int64_t d, const float *x, int64_t x_stride, int64_t bits, int64_t exponent,
                            float top, int64_t largest_exponent, int64_t group, int64_t kind, const float *shared,
                            int64_t shared_step, uint8_t *codes, int64_t code_stride, void *scales,
                            int64_t scale_stride, int64_t group_stride) {
    const int fraction = 7 - (int)exponent;
    for (int64_t head = 0; head < heads; head++, x += x_stride, codes += code_stride) {
        const float all = shared[head * shared_step];
        for (int64_t block = 0; block < d / group; block++) {
            const float *mine = x + block * group;
            const int64_t at = head * scale_stride + block * group_stride;
            float largest = 0, divisor = all, factor = 0;
            for (int64_t c = 0; c < group && kind != NONE; c++) largest = std::fmax(largest, std::fabs(mine[c]));
            if (kind == FLOAT) {
                const float scale = std::fmax(largest / top, LEAST);
                ((float *)scales)[at] = scale;
                factor = 1 / scale;
            } else if (kind == E4M3) {
                const uint8_t byte = of_eight(largest / 6 / all, 4, 3, 448);
                ((uint8_t *)scales)[at] = byte;
                divisor = e4m3(byte) * all;
                if (divisor == 0) divisor = INFINITY;  // of which only the sign is left
            } else if (kind == E8M0) {
                int power = 0;
                if (largest > 0) std::frexp(largest, &power);
                power = power - 1 - (int)largest_exponent;
                power = power < -127 ? -127 : power > 127 ? 127 : power;
                ((uint8_t *)scales)[at] = largest > 0 ? (uint8_t)(power + 127) : 0;
                factor = std::ldexp(1.0f, -power);
            }
            for (int64_t c = 0; c < group; c++) {
                const float number = factor != 0 ? mine[c] * factor : mine[c] / divisor;
                const int64_t channel = block * group + c;
                const bool is_zero = kind == E8M0 && !(largest > 0);
                if (bits == 8)
                    codes[channel] = is_zero ? 0 : of_eight(number, (int)exponent, fraction, top);
                else if (c % 2 == 0)
                    codes[channel / 2] = is_zero ? 0 : of_four(number);
                else if (!is_zero)
                    codes[channel / 2] |= (uint8_t)(of_four(number) << 4);
            }
        }
    }
}
