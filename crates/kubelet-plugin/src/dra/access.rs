//! The API server, with the kubelet's credentials: no ServiceAccount, no role and no image are needed.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::report::failure;
use base::sys::file_id::FileId;
use base::sys::guarded::is_trusted;
use findings::catalog;
use http_body_util::{LengthLimitError, Limited};
use hyper::Response;
use hyper::header::{HeaderValue, RETRY_AFTER, USER_AGENT};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{PartialObjectMeta, PostParams};
use kube::client::{ClientBuilder, DynBody};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use tokio::sync::Mutex;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tower::util::MapResponseLayer;

use super::pace::{Pace, chance};
use crate::model::Refusal;
use crate::node::host;
use crate::watched_files::WatchedFiles;

/// The kubelet's credentials: kubeadm and CRI-O, RKE2, K3s, MicroShift, k0s. OpenShift and EKS have them in the kubelet's directory.
const KUBECONFIGS: [&str; 5] = [
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/microshift/resources/kubelet/kubeconfig",
    "/var/lib/k0s/kubelet.conf",
];

/// The user of a kubelet has this prefix before the name of its node.
const NODE_USER: &str = "system:node:";
/// The part of a ServiceAccount's token that names the node of its pod.
const NODE_OF_TOKEN: &str = "authentication.kubernetes.io/node-name";

/// How long the connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// The most bytes of an answer, and of the events of a watch, which lasts a few minutes. The API server stores objects of 1.5 MiB at most.
const MAX_ANSWER: usize = 16 << 20;
/// How long one request may take, apart from a watch. The kubelet waits 45 s for a claim.
const REQUEST: Duration = Duration::from_secs(10);

/// How long to wait before a claim is read again. The kubelet, which waits for the answer, tries it once a minute.
const CLAIM: Pace = Pace {
    first: Duration::from_millis(500),
    longest: Duration::from_secs(4),
};
/// How often a claim is read again, so that the answer of the API server is reported rather than that there was none in time.
const MAX_TRIES: u32 = 3;

/// What fails if the connection cannot be prepared.
const NO_CLIENT: &str = "cannot create a client of the API server";

/// The API server.
#[derive(Debug)]
pub struct Access {
    /// The file of the settings
    given: Option<PathBuf>,
    kubelet_dir: PathBuf,
    clients: Mutex<Clients>,
    retry_after: RetryAfter,
}

/// How long the API server has asked to wait, in its newest answer that asks for that.
type RetryAfter = Arc<std::sync::Mutex<Option<Duration>>>;

/// The client, and the one that is being built.
#[derive(Default)]
struct Clients {
    built: Option<Built>,
    building: Option<Building>,
}

impl fmt::Debug for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clients")
    }
}

/// A client, and the files from which it was built: the kubeconfig file and those that it names; none with the credentials of the pod.
struct Built {
    client: Client,
    files: WatchedFiles,
}

/// A thread that builds a client, and the files that it uses.
struct Building {
    task: JoinHandle<Result<Client, kube::Error>>,
    files: WatchedFiles,
}

impl Clients {
    /// Waits for the thread that builds a client, and starts one if there is none. Returns the client, and the files that it uses.
    ///
    /// # Errors
    /// If the credentials cannot be read, or the thread takes too long. It then continues.
    async fn build(
        &mut self,
        kubeconfig: Option<&Path>,
        retry_after: &RetryAfter,
    ) -> Result<(Result<Client>, WatchedFiles)> {
        let Building { task, files } = match &mut self.building {
            Some(building) => building,
            None => {
                let building = Building::start(kubeconfig, retry_after.clone()).await?;
                self.building.insert(building)
            }
        };
        let built = timeout(REQUEST, task)
            .await
            .context("the exec plugin of the kubeconfig did not answer in time")
            .context(NO_CLIENT)?;
        let files = std::mem::take(files);
        self.building = None;
        let client = built.map_err(anyhow::Error::from);
        let client = client.and_then(|client| Ok(client?)).context(NO_CLIENT);
        Ok((client, files))
    }
}

impl Building {
    /// Starts a thread that builds a client. It runs the exec plugin of the kubeconfig, which can wait for a network without an end. It
    /// blocks the thread, so the next attempt waits for the same plugin.
    async fn start(kubeconfig: Option<&Path>, retry_after: RetryAfter) -> Result<Self> {
        let (mut config, files) = match kubeconfig {
            Some(path) => read(path)
                .await
                .with_context(|| format!("cannot use the credentials in {path:?}"))?,
            None => (
                Config::incluster().context("cannot use the credentials of the pod")?,
                WatchedFiles::default(),
            ),
        };
        config.connect_timeout = Some(CONNECT);
        // The library repeats requests after milliseconds, all nodes at the same time.
        config.default_retry = false;
        let agent = HeaderValue::from_static(concat!(
            env!("CARGO_PKG_NAME"),
            "/",
            env!("CARGO_PKG_VERSION")
        ));
        config.headers.push((USER_AGENT, agent));
        let task = spawn_blocking(move || build(config, retry_after));
        Ok(Self { task, files })
    }
}

impl Access {
    /// Creates the access with this kubeconfig file, or with the kubelet's.
    #[must_use]
    pub fn new(given: Option<&Path>, kubelet_dir: &Path) -> Self {
        Self {
            given: given.map(Path::to_owned),
            kubelet_dir: kubelet_dir.to_owned(),
            clients: Mutex::default(),
            retry_after: RetryAfter::default(),
        }
    }

    /// Returns the file with the credentials that exists now; `None` if the pod has a ServiceAccount.
    ///
    /// # Errors
    /// If there are no credentials.
    pub fn kubeconfig(&self) -> Result<Option<PathBuf>> {
        if let Some(given) = &self.given {
            return Ok(Some(given.clone()));
        }
        for candidate in KUBECONFIGS {
            if Path::new(candidate).is_file() {
                return Ok(Some(candidate.into()));
            }
        }
        let in_kubelet_dir = self.kubelet_dir.join("kubeconfig");
        if in_kubelet_dir.is_file() {
            return Ok(Some(in_kubelet_dir));
        }
        if host::is_in_pod() {
            return Ok(None);
        }
        let places = KUBECONFIGS.join(", ");
        Err(failure(
            &catalog::API_SERVER,
            format!(
                "cannot find the kubelet's credentials for the API server: {places} and \
                 {in_kubelet_dir:?} are missing"
            ),
            "name the kubelet's kubeconfig file with `--kubeconfig`; `systemctl cat kubelet` shows it",
        ))
    }

    /// Returns a client. The kubelet replaces its certificate from time to time: the client is built again when a file has changed.
    ///
    /// # Errors
    /// If the credentials cannot be read.
    pub async fn client(&self) -> Result<Client> {
        let path = self.kubeconfig()?;
        let path = path.as_deref();
        let mut clients = self.clients.lock().await;
        if let Some(Built { client, files }) = &clients.built
            && files.first() == path
            && files.are_the_same()
        {
            return Ok(client.clone());
        }
        let is_pending = clients.building.is_some();
        let (mut client, mut files) = clients.build(path, &self.retry_after).await?;
        // An earlier call has started the thread, and the files may have changed since.
        if is_pending && (files.first() != path || !files.are_the_same()) {
            (client, files) = clients.build(path, &self.retry_after).await?;
        }
        let client = client?;
        clients.built = Some(Built {
            client: client.clone(),
            files,
        });
        Ok(client)
    }

    /// Returns the identities of the files with the credentials, which change when the credentials are replaced.
    pub(super) async fn stamp(&self) -> Vec<Option<FileId>> {
        if let Some(Built { files, .. }) = &self.clients.lock().await.built {
            return files.states();
        }
        match self.kubeconfig() {
            Ok(Some(file)) => WatchedFiles::of([file]).states(),
            Ok(None) | Err(_) => Vec::new(),
        }
    }

    /// Returns how long the API server has asked to wait since the last call (the header `Retry-After`).
    pub(super) fn take_retry_after(&self) -> Option<Duration> {
        let mut retry_after = self.retry_after.lock();
        retry_after.as_mut().ok()?.take()
    }

    /// Returns the name of the node to which the credentials belong; without one, the host name.
    ///
    /// # Errors
    /// If the API server does not answer, or refuses to.
    pub async fn node_name(&self) -> Result<String> {
        let reviews: Api<SelfSubjectReview> = Api::all(self.client().await?);
        let asked = SelfSubjectReview::default();
        let user = match in_time(reviews.create(&PostParams::default(), &asked)).await? {
            Ok(review) => {
                let status = review.status.unwrap_or_default();
                status.user_info.unwrap_or_default()
            }
            Err(error) => {
                return Err(describe(&error).context(
                    "cannot learn the name of the node (the setting \"node-name\" gives it)",
                ));
            }
        };
        if let Some(name) = &user.username
            && let Some(node) = name.strip_prefix(NODE_USER)
        {
            return Ok(node.to_owned());
        }
        let extra = user.extra.unwrap_or_default();
        match extra.get(NODE_OF_TOKEN).and_then(|values| values.first()) {
            Some(node) => Ok(node.clone()),
            None => Ok(host::node_name()),
        }
    }
}

impl Access {
    /// Reads a claim, and asks again while the API server has too much to do.
    async fn get_patiently(
        &self,
        claims: &Api<ResourceClaim>,
        name: &str,
    ) -> Result<ResourceClaim, kube::Error> {
        let mut failures = 0;
        loop {
            match claims.get(name).await {
                Err(kube::Error::Api(status)) if matches!(status.code, 429 | 503 | 504) => {
                    failures += 1;
                    let asked = self.take_retry_after();
                    if failures > MAX_TRIES {
                        return Err(kube::Error::Api(status));
                    }
                    sleep(CLAIM.pause(failures, asked, chance())).await;
                }
                answer => return answer,
            }
        }
    }

    /// Returns the owner of the slices of a node: they are deleted with it.
    ///
    /// # Errors
    /// If the API server does not answer; inside, if it refuses the request.
    pub async fn node_reference(&self, node: &str) -> Result<Result<OwnerReference, kube::Error>> {
        let nodes: Api<Node> = Api::all(self.client().await?);
        let reference = |found: PartialObjectMeta<Node>| OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.to_owned(),
            uid: found.metadata.uid.unwrap_or_default(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        Ok(in_time(nodes.get_metadata(node)).await?.map(reference))
    }
}

/// Awaits a request for a limited time.
///
/// # Errors
/// If it takes longer; inside, the errors of the request.
pub(super) async fn in_time<T>(
    request: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Result<T, kube::Error>> {
    timeout(REQUEST, request)
        .await
        .context("the API server did not answer in time")
}

async fn read(path: &Path) -> Result<(Config, WatchedFiles)> {
    // Each file is examined before it is read, so that a later change is noticed.
    let mut files = WatchedFiles::of([path.to_owned()]);
    let kubeconfig = Kubeconfig::read_from(path)?;
    check_programs(path, &kubeconfig)?;
    let clusters = kubeconfig.clusters.iter();
    for cluster in clusters.filter_map(|named| named.cluster.as_ref()) {
        if let Some(path) = &cluster.certificate_authority {
            files.add(path.into());
        }
    }
    let users = kubeconfig.auth_infos.iter();
    for user in users.filter_map(|named| named.auth_info.as_ref()) {
        let paths = [&user.client_certificate, &user.client_key];
        for path in paths.into_iter().flatten() {
            files.add(path.into());
        }
    }
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    Ok((config, files))
}

/// Checks that only root chooses the program that a kubeconfig names to get credentials, such as `aws` on EKS: this process runs it.
fn check_programs(path: &Path, kubeconfig: &Kubeconfig) -> Result<()> {
    let mut users = kubeconfig.auth_infos.iter();
    let has_program = users.any(|user| {
        let user = user.auth_info.as_ref();
        user.is_some_and(|user| user.exec.is_some() || user.auth_provider.is_some())
    });
    if !has_program {
        return Ok(());
    }
    let file = fs::metadata(path)?;
    let is_writable = file.mode() & 0o022 != 0;
    if is_writable || !is_trusted(file.uid()) {
        bail!(
            "it specifies a program (exec), and other users than root can write to the file; \
             run \"chown root {0}; chmod 600 {0}\"",
            path.display()
        );
    }
    Ok(())
}

/// Creates a client that reads answers of a limited length, and notes how long the API server asks to wait.
fn build(config: Config, retry_after: RetryAfter) -> Result<Client, kube::Error> {
    let limit = MapResponseLayer::new(move |answer: Response<Box<DynBody>>| {
        if let Some(seconds) = seconds(answer.headers().get(RETRY_AFTER))
            && let Ok(mut retry_after) = retry_after.lock()
        {
            *retry_after = Some(Duration::from_secs(seconds));
        }
        answer.map(|body| Limited::new(body, MAX_ANSWER))
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&limit).build())
}

/// Parses the header `Retry-After`. The API server names seconds, not a date.
fn seconds(header: Option<&HeaderValue>) -> Option<u64> {
    header?.to_str().ok()?.trim().parse().ok()
}

/// The answer to each request of an API server without the API of the slices.
pub const NO_SLICES: &str =
    "the API server has no resource.k8s.io/v1, which needs Kubernetes 1.34 or newer";

/// Returns the text of an error of a request for all slices of a node, or for a new one: if something is missing, it is their API.
#[must_use]
pub fn describe_slices(error: &kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) if status.code == 404 => describe(error).context(NO_SLICES),
        _ => describe(error),
    }
}

/// Returns the text of an error: what the API server answered, or the causes of a connection that failed.
#[must_use]
pub fn describe(error: &kube::Error) -> anyhow::Error {
    if let kube::Error::Api(status) = error {
        return anyhow::anyhow!(
            "the API server answered {}: {}",
            status.code,
            status.message
        );
    }
    let mut causes: Vec<String> = Vec::new();
    let mut next: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(cause) = next {
        if cause.is::<LengthLimitError>() {
            return anyhow::anyhow!(
                "the answer of the API server is longer than {MAX_ANSWER} bytes"
            );
        }
        let text = cause.to_string();
        if causes.last().is_none_or(|last| !last.ends_with(&text)) {
            causes.push(text);
        }
        next = cause.source();
    }
    let cause = if causes.is_empty() {
        error.to_string()
    } else {
        causes.join(": ")
    };
    anyhow::anyhow!("the API server cannot be reached: {cause}")
}

impl Access {
    /// Reads a claim.
    ///
    /// # Errors
    /// If the API server does not answer, or refuses it.
    pub(super) async fn claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ResourceClaim, Refusal> {
        let ask = async {
            let claims: Api<ResourceClaim> = Api::namespaced(self.client().await?, namespace);
            match in_time(self.get_patiently(&claims, name)).await? {
                Ok(claim) => Ok(Some(claim)),
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
                Err(error) => Err(describe(&error)),
            }
        };
        let answer = ask.await;
        let fix = "run \"oci-nvidia-kubelet-plugin check --interface dra\" on the node; the kubelet tries it again";
        match answer {
            Ok(Some(claim)) => Ok(claim),
            Ok(None) => {
                let what = format!("the claim \"{namespace}/{name}\" does not exist");
                Err(Refusal::of(&catalog::CLAIM_STALE, &what, "delete the pod"))
            }
            Err(error) => {
                let what = format!("cannot read the claim \"{namespace}/{name}\": {error:#}");
                Err(Refusal::of(&catalog::CLAIM_UNREADABLE, &what, fix))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    use super::*;

    /// The program of a kubeconfig runs with the rights of this process.
    #[tokio::test]
    async fn a_program_that_others_than_root_choose() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let ran = dir.path().join("ran");
        for (user, mode, is_refused) in [
            (
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: ['RAN']}",
                0o622,
                true,
            ),
            (
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: ['RAN']}",
                0o620,
                true,
            ),
            (
                "auth-provider: {name: gcp, config: {cmd-path: touch, cmd-args: RAN}}",
                0o602,
                true,
            ),
            ("token: secret", 0o622, false),
            (
                "exec: {apiVersion: client.authentication.k8s.io/v1, command: touch, args: ['RAN']}",
                0o644,
                false,
            ),
        ] {
            let user = user.replace("RAN", ran.to_str().unwrap());
            let text = format!(
                "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:1'}}}}], \
                 contexts: [{{name: c, context: {{cluster: c, user: u}}}}], users: [{{name: u, user: {{{user}}}}}]}}"
            );
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let result = Access::new(Some(&path), dir.path()).client().await;
            let error = result
                .err()
                .map(|error| format!("{error:#}"))
                .unwrap_or_default();
            let refused =
                error.contains("it specifies a program (exec), and other users than root");
            assert_eq!(refused, is_refused, "{user} {mode:o}: {error}");
            assert!(!(is_refused && ran.exists()), "{user} {mode:o}");
        }
        assert!(ran.exists(), "the program of root runs");
    }

    #[test]
    fn without_credentials_the_error_names_all_places() {
        let dir = tempfile::tempdir().unwrap();
        // A machine for tests can be a node.
        if KUBECONFIGS.iter().all(|path| !Path::new(path).is_file()) {
            let error = Access::new(None, dir.path()).kubeconfig().unwrap_err();
            let error = format!("{error:#}");
            let own = dir.path().join("kubeconfig");
            for place in KUBECONFIGS.into_iter().chain(own.to_str()) {
                assert!(error.contains(place), "{place}: {error}");
            }
        }
        let given = dir.path().join("given");
        let found = Access::new(Some(&given), dir.path()).kubeconfig().unwrap();
        assert_eq!(found, Some(given));
        let own = dir.path().join("kubeconfig");
        fs::write(&own, "").unwrap();
        let found = Access::new(None, dir.path()).kubeconfig().unwrap();
        assert!(found.is_some());
    }

    /// The plugin has one thread. A plugin of the kubeconfig that hangs must stop neither health checks nor the answers for the kubelet.
    #[tokio::test]
    async fn an_exec_plugin_that_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
            clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n\
            contexts: [{name: c, context: {cluster: c, user: u}}]\n\
            users: [{name: u, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: sleep, args: ['25']}}}]\n";
        fs::write(&path, text).unwrap();
        let access = Access::new(Some(&path), dir.path());
        let started = Instant::now();
        let mut rounds = 0;
        let error = {
            let mut client = std::pin::pin!(access.client());
            loop {
                tokio::select! {
                    result = &mut client => break result.err().unwrap(),
                    () = tokio::time::sleep(Duration::from_millis(100)) => rounds += 1,
                }
            }
        };
        let text = format!("{error:#}");
        assert!(
            text.ends_with(
                "the exec plugin of the kubeconfig did not answer in time: deadline has elapsed"
            ),
            "{text}"
        );
        assert!(
            rounds > 10 && started.elapsed() < Duration::from_secs(20),
            "{rounds} in {:?}",
            started.elapsed()
        );
        assert!(
            access.clients.lock().await.building.is_some(),
            "the next attempt starts no other process"
        );
    }
    /// The kubelet gets a new kubeconfig while the exec plugin of the old one waits.
    #[tokio::test]
    async fn a_kubeconfig_that_changes_while_its_exec_plugin_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let (path, go) = (dir.path().join("kubeconfig"), dir.path().join("go"));
        let write = |namespace: &str, user: &str| {
            let text = format!(
                "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:1'}}}}], \
                 contexts: [{{name: c, context: {{cluster: c, user: u, namespace: {namespace}}}}}], users: [{{name: u, user: {user}}}]}}"
            );
            fs::write(&path, text).unwrap();
        };
        let credentials = r#"{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t"}}"#;
        let script = format!(
            "until [ -e {} ]; do sleep 0.1; done; echo \"$ANSWER\"",
            go.display()
        );
        let exec = serde_json::json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script],
            "env": [{"name": "ANSWER", "value": credentials}],
        }});
        write("old", &exec.to_string());
        let access = Access::new(Some(&path), dir.path());
        assert!(access.client().await.is_err(), "it waits");
        write("new", "{token: secret}");
        fs::write(&go, "").unwrap();
        for _ in 0..2 {
            let client = access.client().await.unwrap();
            assert_eq!(client.default_namespace(), "new");
        }
    }
}
