/* One message of so many bytes, each with `stride - 1` bytes of holes behind it, checked byte by byte:
 *
 *     large COUNT STRIDE
 *
 * An MPI packs and unpacks what has holes, for seconds in which it does not poll. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char expected(MPI_Count i)
{
	return (unsigned char)(i * 7 + (i >> 16) * 3 + 1);
}

static int fail(const char *what)
{
	fprintf(stderr, "%s\n", what);
	MPI_Abort(MPI_COMM_WORLD, 1);
	return 1;
}

int main(int argc, char **argv)
{
	int rank, ranks;
	MPI_Datatype type;
	MPI_Init(&argc, &argv);
	if (argc != 3)
		return fail("large COUNT STRIDE");
	MPI_Count count = atoll(argv[1]), stride = atoll(argv[2]);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	unsigned char *buf = calloc(count, stride);
	if (ranks != 2 || !buf)
		return fail("two ranks, and memory for them");
	MPI_Type_create_resized(MPI_BYTE, 0, stride, &type);
	MPI_Type_commit(&type);
	if (rank == 0) {
		for (MPI_Count i = 0; i < count; i++)
			buf[i * stride] = expected(i);
		MPI_Send_c(buf, count, type, 1, 5, MPI_COMM_WORLD);
	} else {
		MPI_Recv_c(buf, count, type, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		for (MPI_Count i = 0; i < count; i++)
			if (buf[i * stride] != expected(i))
				return fail("a byte is wrong");
		for (MPI_Count i = 0; stride > 1 && i < count; i++)
			if (buf[i * stride + 1])
				return fail("a hole was written");
		printf("all %lld bytes are right\n", (long long)count);
	}
	MPI_Type_free(&type);
	MPI_Finalize();
	return 0;
}
