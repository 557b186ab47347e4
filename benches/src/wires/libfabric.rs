//! libfabric's ping-pong, run as a pair of processes.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::LEN;

/// Arguments of `fi_pingpong`.
#[derive(Clone, Copy, Debug)]
pub struct Pingpong {
    /// The provider.
    pub provider: &'static str,
    /// Control port, different for each pair.
    pub control: u16,
}

impl Pingpong {
    fn args(&self, count: u64) -> Vec<String> {
        let words = [
            "-p",
            self.provider,
            "-e",
            "rdm",
            "-m",
            "tagged",
            "-S",
            &LEN.to_string(),
            "-I",
            &count.to_string(),
        ];
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    /// The two command lines, for a reader.
    pub fn lines(&self, count: u64, there: &str) -> [String; 2] {
        let words = self.args(count).join(" ");
        [format!("fi_pingpong {words}"), format!("fi_pingpong {words} {there}")]
    }

    /// Half round trip in nanoseconds, as reported by the client. `server` and `client` run the
    /// program on their nodes; `there` is the server's address.
    ///
    /// # Errors
    /// The program is not installed, or its output is unexpected.
    pub fn run(
        &self,
        mut server: Command,
        mut client: Command,
        there: &str,
        count: u64,
    ) -> Result<f64, String> {
        let control = self.control.to_string();
        let words = self.args(count);
        let said = |e: std::io::Error| format!("fi_pingpong: {e}");
        server.args(&words).args(["-B", &control]).stdin(Stdio::null());
        let server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(said)?;
        let mut server = KillOnDrop(server);
        client.args(&words).args(["-P", &control, there]).stdin(Stdio::null());
        let start = Instant::now();
        loop {
            let out = client.output().map_err(said)?;
            if out.status.success() {
                let text = String::from_utf8_lossy(&out.stdout);
                return half_trip(&text).ok_or_else(|| format!("fi_pingpong said: {text}"));
            }
            // The server may not listen yet.
            let over = start.elapsed() > Duration::from_secs(5);
            if over || server.0.try_wait().map_err(said)?.is_some() {
                let text = String::from_utf8_lossy(&out.stderr);
                let text: Vec<&str> = text.split_whitespace().collect();
                return Err(format!("fi_pingpong -p {}: {}", self.provider, text.join(" ")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A child process, killed on drop.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // It may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Parses the column `usec/xfer` of the line of the measured size.
fn half_trip(text: &str) -> Option<f64> {
    let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let column = lines.find_map(|words| words.iter().position(|word| *word == "usec/xfer"))?;
    let row = lines.find(|words| words.first() == Some(&"64"))?;
    Some(row.get(column)?.parse::<f64>().ok()? * 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_is_found_in_what_the_program_prints() {
        let text = "bytes   #sent   #ack     total       time     MB/sec    usec/xfer   \
                    Mxfers/sec\n64      10k     =10k     1.2m        0.18s      7.28       8.79  \
                    0.11\n";
        assert_eq!(half_trip(text), Some(8790.0));
        assert_eq!(half_trip(""), None);
    }
}
