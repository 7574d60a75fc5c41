/* The kernels of STREAM (copy, add, triad) and the in-place add that crater-probe runs.
 *
 * stream ELEMENTS REPEATS prints "NAME best median" in GB/s of the bytes that STREAM counts.
 * Compiled with -O3 -march=native -fopenmp, without streaming stores, and in huge pages where there
 * are, as crater-probe's own arrays. */
#define _DEFAULT_SOURCE
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static double *array(long n) {
    double *x = aligned_alloc(1 << 21, n * sizeof(double));
    if (!x)
        exit(1);
    madvise(x, n * sizeof(double), MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i++)
        x[i] = 0.5;
    return x;
}

static int order(const void *x, const void *y) {
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

#define KERNEL(name, bytes, statement)                                                             \
    do {                                                                                           \
        for (int k = 0; k <= repeats; k++) {                                                       \
            double start = omp_get_wtime();                                                        \
            _Pragma("omp parallel for schedule(static)") for (long i = 0; i < n; i++) statement;   \
            if (k)                                                                                 \
                seconds[k - 1] = omp_get_wtime() - start;                                          \
        }                                                                                          \
        qsort(seconds, repeats, sizeof *seconds, order);                                           \
        printf(name " %.2f %.2f\n", (bytes) * (double)n / seconds[0] / 1e9,                        \
               (bytes) * (double)n / seconds[repeats / 2] / 1e9);                                  \
    } while (0)

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    long n = atol(argv[1]);
    int repeats = atoi(argv[2]);
    double *a = array(n), *b = array(n), *c = array(n), *seconds = calloc(repeats, sizeof *seconds);
    KERNEL("copy", 16, c[i] = a[i]);
    KERNEL("add", 24, c[i] = a[i] + b[i]);
    KERNEL("triad", 24, a[i] = b[i] + 3.0 * c[i]);
    KERNEL("in-place", 24, a[i] += b[i]);
    return 0;
}
