/*
 * mpi CASE COUNT: nanoseconds of COUNT rounds of 100 operations, a line each, on rank 0. "pingpong":
 * half a round trip of 8 bytes between two ranks; "allreduce": one of 8 bytes.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 100 };

static double round_of(int pingpong, int rank)
{
	double start = MPI_Wtime();
	for (int i = 0; i < BATCH; i++) {
		double in = i, out = 0;
		if (!pingpong) {
			MPI_Allreduce(&in, &out, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
		} else if (rank == 0) {
			MPI_Send(&in, 8, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
			MPI_Recv(&out, 8, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(&out, 8, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(&in, 8, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
		}
	}
	return (MPI_Wtime() - start) * 1e9 / BATCH / (pingpong ? 2 : 1);
}

int main(int argc, char **argv)
{
	int rank, pingpong;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	if (argc < 3)
		MPI_Abort(MPI_COMM_WORLD, 2);
	pingpong = !strcmp(argv[1], "pingpong");
	for (int i = 0; i < 20; i++)
		round_of(pingpong, rank);
	for (long i = 0; i < atol(argv[2]); i++) {
		double ns = round_of(pingpong, rank);
		if (rank == 0)
			printf("%.1f\n", ns);
	}
	MPI_Finalize();
	return 0;
}
